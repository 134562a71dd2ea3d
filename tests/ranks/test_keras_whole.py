"""`prepare(whole=True)`: losses in which samples meet have the weights, history and evaluation of plain Keras."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from harness import PROGRAMS, run_ranks
from limits import Limit

PROGRAM = PROGRAMS / "keras" / "whole.py"
LOSSES = re.findall(r"^@loss\ndef (\w+)", PROGRAM.read_text(encoding="utf-8"), re.MULTILINE)
BOUNDS = {"tensorflow": 1e-10, "torch": 1e-6}  # Keras on PyTorch takes losses in float32


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [("tensorflow", 2), *(pytest.param("torch", ranks, marks=pytest.mark.thorough) for ranks in (3, 1))],
)
def test_losses_of_the_whole_batch_are_those_of_plain_keras(
    backend: str, ranks: int, tmp_path: Path, limit: Limit
) -> None:
    out = tmp_path / "found.json"
    run_ranks([PROGRAM, out], ranks, env={"KERAS_BACKEND": backend}, timeout_s=400).check()
    found = json.loads(out.read_text())
    assert list(found) == LOSSES
    for name, errors in found.items():
        assert max(errors) <= BOUNDS[backend], (name, errors)
    if backend == "tensorflow":
        worst = max(error for errors in found.values() for error in errors)
        limit("K29", f"{len(found)} losses in which samples meet, prepare(model, data, whole=True)", exact=worst)
