"""The promises a newcomer meets first, in under three minutes: `scripts/test.sh --smoke`, `scripts/versions.sh`.

It needs pytest and psutil beside hvdtrain's own requirements, and runs without TensorFlow.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from harness import PROGRAMS, Result, run_ranks

from hvdtrain.core import variables

SMOKE = PROGRAMS / "smoke"
TORCH, KERAS = SMOKE / "torch_train.py", SMOKE / "keras_train.py"
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
needs_keras = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")


def ends_well(done: Result) -> Result:
    assert done.returncode == 0, done.text
    return done


def launch(program: Path, *arguments: str) -> Result:
    """Runs a program on 2 ranks by `hvdtrain launch`."""
    command = ["-m", "hvdtrain", "launch", "-np", "2", "--", "python", str(program), *arguments]
    return ends_well(run_ranks(command, 1, launcher="none", timeout_s=150))


def difference(one: Result, other: Result) -> float:
    """Returns the largest difference between the weights that two programs printed."""
    first, second = (flat(json.loads(done.text.split("weights ")[1].splitlines()[0])) for done in (one, other))
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def flat(values: object) -> list[float]:
    return [number for part in values for number in flat(part)] if isinstance(values, list) else [values]  # type: ignore[list-item]


@needs_torch
def test_torch_ranks_that_resume_equal_one_process(tmp_path):
    plain = ends_well(run_ranks([TORCH, "plain"], 1))
    first, resumed = (launch(TORCH, "ranks", str(tmp_path / "run"), epochs) for epochs in ("1", "2"))
    assert ("restored False" in first.text, "restored True" in resumed.text) == (True, True)
    assert difference(plain, resumed) < 1e-10
    assert difference(plain, first) > 1e-3, "the twin: an epoch less shows"


@needs_torch
def test_a_hang_is_named():
    done = run_ranks([TORCH, "hang"], 2, launcher="horovodrun", env={variables.HANG_S: "3"}, timeout_s=150)
    assert done.returncode != 0, done.text
    assert "ranks must not keep others waiting" in done.text and "# hangs here" in done.text, done.text


@needs_torch
def test_a_model_is_split():
    done = ends_well(run_ranks([SMOKE / "split.py"], 1))
    _, stages, _, moved, _, difference = done.ranks_output[0].split()
    assert (int(stages), float(difference) < 1e-10, float(moved) > 1e-3) == (2, True, True), done.text


@needs_keras
def test_keras_ranks_equal_one_process():
    plain = ends_well(run_ranks([KERAS, "plain"], 1, timeout_s=150))
    assert difference(plain, launch(KERAS, "ranks")) < 1e-10
