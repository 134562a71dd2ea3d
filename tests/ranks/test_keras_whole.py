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
WAYS = [("tensorflow", 2, "some"), ("torch", 3, "all")]
MORE = [("tensorflow", 1, "some"), ("tensorflow", 3, "all"), ("torch", 1, "some"), ("torch", 2, "all")]


@pytest.mark.parametrize(
    ("backend", "ranks", "which"), [*WAYS, *(pytest.param(*way, marks=pytest.mark.thorough) for way in MORE)]
)
def test_losses_of_the_whole_batch_are_those_of_plain_keras(
    backend: str, ranks: int, which: str, tmp_path: Path, limit: Limit
) -> None:
    out = tmp_path / "found.json"
    run_ranks([PROGRAM, out, which], ranks, env={"KERAS_BACKEND": backend}, timeout_s=400).check()
    found = json.loads(out.read_text())
    assert list(found) == (LOSSES if which == "all" else LOSSES[::3])
    for name, errors in found.items():
        assert max(errors) <= BOUNDS[backend], (name, errors)
    if (backend, ranks) == ("tensorflow", 2):
        worst = max(error for errors in found.values() for error in errors)
        limit("K29", f"{len(found)} losses in which samples meet, prepare(model, data, whole=True)", exact=worst)
