"""N ranks x batch B end with the weights of one process x batch N·B, in every configuration the adapter supports."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import FORKED, PROGRAMS, run_ranks

PROGRAM = PROGRAMS / "torch" / "parity.py"
NAMED = re.findall(r'^    "(\w+)": Case\(', PROGRAM.read_text("utf-8"), re.MULTILINE)
OTHERS = [name for name in NAMED if name not in ("fp16", "bf16")]

MATRIX = [f"accumulate{accumulate}{clip}" for accumulate in (1, 3) for clip in ("", "_clip")]
# gradients rounded for the way; and Horovod has no bfloat16 sum
COMPRESSED = {"horovod": ["fp16"], "ddp": ["fp16", "bf16"]}


@dataclass(frozen=True)
class Outcome:
    weights: dict[str, dict[str, np.ndarray]]
    facts: dict[str, Any]
    engine: str
    log: str


def run(engine: str, ranks: int, folder: Path) -> Outcome:
    out = folder / f"{engine}{ranks}.npz"
    ended = run_ranks([PROGRAM, engine, out], ranks, launcher=FORKED[engine], timeout_s=300).check()
    weights: dict[str, dict[str, np.ndarray]] = {}
    with np.load(out) as stored:
        for key in stored.files:
            case, _, name = key.partition("/")
            weights.setdefault(case, {})[name] = stored[key]
    return Outcome(weights, json.loads(Path(f"{out}.json").read_text()), engine, ended.text)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run("solo", 1, tmp_path_factory.mktemp("one"))


@pytest.fixture(
    scope="module",
    params=[
        ("horovod", 2),
        *(pytest.param(way, marks=pytest.mark.thorough) for way in (("horovod", 4), ("ddp", 2), ("ddp", 4))),
    ],
    ids=lambda param: "-".join(map(str, param)),
)
def many(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    engine, ranks = request.param
    return run(engine, ranks, tmp_path_factory.mktemp("many"))


def difference(a: Outcome, b: Outcome, case: str) -> float:
    """max |dw| over a case's parameters and buffers; NaN stays NaN."""
    assert a.weights[case].keys() == b.weights[case].keys()
    return float(np.max([np.abs(a.weights[case][name] - b.weights[case][name]).max() for name in a.weights[case]]))


def check_case(case: str, one: Outcome, many: Outcome, tolerance: float) -> None:
    wanted, received = one.facts[case], many.facts[case]
    assert received["equal"], "replicas differ"
    assert difference(one, many, case) <= tolerance
    np.testing.assert_allclose(received["losses"], wanted["losses"], rtol=0, atol=tolerance)
    assert {k: received[k] for k in ("steps", "samples")} == {k: wanted[k] for k in ("steps", "samples")}
    assert received["lr"] == pytest.approx(wanted["lr"], rel=1e-12)


@pytest.mark.parametrize("case", [*MATRIX, *OTHERS])
def test_ranks_equal_one_process(case: str, one: Outcome, many: Outcome) -> None:
    check_case(case, one, many, 1e-10)


def test_compressed_gradients_come_close(one: Outcome, many: Outcome) -> None:
    for case in COMPRESSED[many.engine]:
        check_case(case, one, many, 0.02)
        assert difference(one, many, case) > 1e-10, "nothing was compressed"


def test_17_samples_give_the_exact_global_mean(one: Outcome, many: Outcome) -> None:
    assert max(one.facts["exact mean of 17"], many.facts["exact mean of 17"]) <= 1e-10


def test_every_case_is_looked_at(many: Outcome) -> None:
    cases = {name for name in many.facts if not name.startswith("exact")}
    assert cases == {*MATRIX, *OTHERS, *COMPRESSED[many.engine]}


def test_averaging_is_proven_and_said(many: Outcome) -> None:
    assert many.log.count("averaging proven") >= len(MATRIX)
