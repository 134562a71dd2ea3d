"""The guard in front of a loss: no false alarm on right programs, no miss on wrong ones, on any batch."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from harness import PROGRAMS, run_ranks

PROGRAM = PROGRAMS / "torch" / "guarded.py"
NOT_LOOKED_AT = {"nodes", "pooled_graphs", "left_out_by_collate"}  # rows that are not samples: one line says so


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("guarded") / "found.json"
    run_ranks([PROGRAM, out], 1, launcher="none", timeout_s=240).check()
    result: dict[str, dict[str, Any]] = json.loads(out.read_text())
    return result


def test_right_programs_train_and_are_exact(found: dict[str, dict[str, Any]]) -> None:
    assert len(found["right"]) >= 60
    wrong = {name: its for name, its in found["right"].items() if its["refused"] or its["error"] > 1e-9}
    assert not wrong
    noted = {name: its["notes"] for name, its in found["right"].items() if its["notes"]}
    assert set(noted) == NOT_LOOKED_AT and all(len(notes) == 1 for notes in noted.values()), noted


def test_wrong_programs_are_refused_at_the_batch_that_shows_it(found: dict[str, dict[str, Any]]) -> None:
    assert len(found["wrong"]) >= 60
    for name, its in found["wrong"].items():
        first = int((re.findall(r"from sample (\d+) on", name) or [0])[0]) // 4  # batches before it are right
        assert its["refused"] and its["batches"] <= first + 3, (name, its)
