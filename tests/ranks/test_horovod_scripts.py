"""Twenty scripts as Horovod's users have them run on this wheel, and end with the same weights on all ranks."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from horovod_scripts import FOLDER, KERAS, TORCH, run_in_turn

LINES = (*TORCH, *KERAS)


def test_they_are_twenty() -> None:
    assert sorted({line.split()[0] for line in LINES}) == sorted(path.name for path in FOLDER.glob("*.py"))
    assert len({line.split()[0] for line in LINES}) == 20


def judge(found: list[dict[str, Any]], lines: tuple[str, ...]) -> None:
    first, *others = found
    for line in lines:
        loss = re.search(r"final loss (\S+)", first[line]["printed"])
        assert loss is not None and math.isfinite(float(loss[1])), line
        for other in others:
            assert "final loss" not in other[line]["printed"], line
            # an ensemble: even ranks have one model, odd ranks another
            alike = first[line]["weights"] == other[line]["weights"]
            assert alike == (line != "torch_process_sets.py"), line


@pytest.mark.thorough
@pytest.mark.parametrize("lines", [TORCH, KERAS], ids=["torch", "keras"])
def test_two_ranks(lines: tuple[str, ...], tmp_path: Path) -> None:
    judge(run_in_turn(lines, tmp_path, launcher="horovodrun"), lines)


@pytest.mark.thorough
def test_mpi(tmp_path: Path) -> None:
    lines = ("torch_mnist.py", "torch_adasum.py --use-adasum", "torch_join.py")
    judge(run_in_turn(lines, tmp_path, launcher="mpirun"), lines)


@pytest.mark.thorough
@pytest.mark.parametrize("line", LINES)
def test_each_on_its_own(line: str, tmp_path: Path) -> None:
    judge(run_in_turn((line,), tmp_path, launcher="horovodrun"), (line,))
