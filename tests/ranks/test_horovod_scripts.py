"""Twenty scripts as Horovod's users have them run on this wheel, and end with the same weights on all ranks."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from horovod_scripts import KERAS, TORCH, run_in_turn


@pytest.mark.thorough
@pytest.mark.parametrize("lines", [TORCH, KERAS], ids=["torch", "keras"])
def test_two_ranks(lines: tuple[str, ...], tmp_path: Path) -> None:
    first, other = run_in_turn(lines, tmp_path, launcher="horovodrun")
    for line in lines:
        loss = re.search(r"final loss (\S+)", first[line]["printed"])
        assert loss is not None and math.isfinite(float(loss[1])), line
        assert "final loss" not in other[line]["printed"], line
        # an ensemble: even ranks have one model, odd ranks another
        alike = first[line]["weights"] == other[line]["weights"]
        assert alike == (line != "torch_process_sets.py"), line
