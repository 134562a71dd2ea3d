"""The guard in front of a loss: no false alarm on right programs, no miss on wrong ones, on any batch."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from harness import PROGRAMS, run_ranks
from limits import Limit

PROGRAM = PROGRAMS / "torch" / "guarded.py"
ROWS = {
    "T39a": ("labels_counted_as_samples_in_a_list", "a list of means, one with a wrong divisor"),
    "T39b": ("first_in_turn_over_labels", "a loss over labels announced with `more=True`, without weight="),
    "T39c": ("weighed_by_a_clamped_number", "weight=count.clamp(min=1), and a batch in which nothing counts"),
    "T39d": ("weighed_by_weights_of_the_batch", "weights balanced over the batch's classes, given as weight="),
    "T39e": ("cooled_by_a_number_of_the_batch", "a temperature made of the batch, by `.item()`"),
    "T39f": ("above_a_number_of_the_outputs", "a threshold made of the outputs, by `float()`"),
}
NOT_LOOKED_AT = {"nodes", "pooled_graphs", "left_out_by_collate"}  # rows that are not samples: one line says so


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("guarded") / "found.json"
    run_ranks([PROGRAM, out], 1, timeout_s=240).check()
    result: dict[str, dict[str, Any]] = json.loads(out.read_text())
    return result


def test_right_programs_train_and_are_exact(found: dict[str, dict[str, Any]], limit: Limit) -> None:
    assert len(found["right"]) >= 40
    wrong = {name: its for name, its in found["right"].items() if its["refused"] or its["error"] > 1e-9}
    assert not wrong
    noted = {name: its["notes"] for name, its in found["right"].items() if its["notes"]}
    assert set(noted) == NOT_LOOKED_AT and all(len(notes) == 1 for notes in noted.values()), noted
    worst = max(found["right"][name]["error"] for name in (*NOT_LOOKED_AT, "crops", "crops_side_by_side"))
    limit("T29", "rows that are not samples: nodes of graphs, pooled graphs, a collate that drops samples", exact=worst)


def test_samples_that_are_mixed_at_random_train(found: dict[str, dict[str, Any]]) -> None:
    """What a sample is mixed with is drawn: another batch would be as right."""
    assert len(found["mixed"]) == 12
    stopped = {name: its for name, its in found["mixed"].items() if its["refused"] or its["notes"]}
    assert not stopped


def test_wrong_programs_are_refused_at_the_batch_that_shows_it(found: dict[str, dict[str, Any]], limit: Limit) -> None:
    assert len(found["wrong"]) >= 45
    for name, its in found["wrong"].items():
        first = int((re.findall(r"from sample (\d+) on", name) or [0])[0]) // 4  # batches before it are right
        assert its["refused"] and its["batches"] <= first + 3, (name, its)
    for row, (name, attack) in ROWS.items():
        limit(row, attack, refused=found["wrong"][name]["refused"])
    limit(
        "T39g",
        "a mean over active samples, weighed by their number",
        exact=found["right"]["over_active_samples"]["error"],
    )
