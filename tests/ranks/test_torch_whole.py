"""Losses of the global batch, in which samples meet, on ranks and over batches, have the weights of one process."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import FORKED, PROGRAMS, run_ranks
from limits import Limit

PROGRAM = PROGRAMS / "torch" / "whole.py"
LOSSES = re.findall(r"^@loss\ndef (\w+)", PROGRAM.read_text("utf-8"), re.MULTILINE)
# engine, ranks, batches of an update
MORE = [
    ("horovod", 1, 1), ("horovod", 1, 3), ("horovod", 2, 3), ("horovod", 3, 1), ("horovod", 3, 3), ("ddp", 2, 1),
    ("ddp", 3, 3),
]  # fmt: skip


@dataclass(frozen=True)
class Found:
    ranks: int
    losses: list[dict[str, Any]]
    means: list[dict[str, list[float]]]  # by rank
    lists: list[float]  # by rank


@pytest.fixture(
    scope="module",
    params=[("horovod", 2, 1), *(pytest.param(way, marks=pytest.mark.thorough) for way in MORE)],
    ids=lambda way: "-".join(map(str, way)),
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    engine, ranks, accumulate = request.param
    out = tmp_path_factory.mktemp("whole") / "found.json"
    run_ranks([PROGRAM, engine, str(accumulate), out], ranks, launcher=FORKED[engine], timeout_s=400).check()
    losses, means, lists = zip(*json.loads(out.read_text()), strict=True)
    return Found(ranks, [one for report in losses for one in report], list(means), list(lists))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_the_whole_batch_is_that_of_one_process(name: str, found: Found) -> None:
    mine = [one for one in found.losses if one["loss"] == name]
    assert mine
    for one in mine:
        assert max(one["errors"]) <= 1e-10, one


def test_every_rank_has_every_loss(found: Found, limit: Limit) -> None:
    assert {one["loss"] for one in found.losses} == set(LOSSES) and len(found.losses) % (found.ranks * len(LOSSES)) == 0
    assert max(found.lists) <= 1e-10, "an item for each sample, also on a rank that has none"
    if found.ranks > 1:
        worst = max(max(one["errors"]) for one in found.losses)
        limit("T34", f"losses in which samples meet, {found.ranks} ranks, the whole batch", exact=worst)


def test_means_with_divisors_of_their_own(found: Found, limit: Limit) -> None:
    worst = 0.0
    for means in found.means:
        worst = max(worst, *means["loop"], *means["call"])
        assert worst <= 1e-10, means
    limit("T30", f"three means with divisors of their own, {found.ranks} ranks, accumulate=3", exact=worst)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_loss_keeps_and_draws_stays(ranks: int, tmp_path: Path) -> None:
    """Of several batches: negatives in a buffer of the model, outputs changed in place, the next random numbers."""
    out = tmp_path / "found.json"
    program = PROGRAMS / "torch" / "whole_kept.py"
    run_ranks([program, out], ranks, timeout_s=90).check()
    reports = json.loads(out.read_text())
    assert len(reports) == ranks and set(reports[0]) == {"layer.weight", "layer.bias", "bank"}
    assert all(off <= 1e-12 for report in reports for off in report.values()), reports


def test_values_of_every_form_are_joined(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    run_ranks([PROGRAMS / "torch" / "joined.py", out], 3, timeout_s=120).check()
    reports = json.loads(out.read_text())
    assert all(report == reports[0] for report in reports)  # the same on every rank
    joined, errors = reports[0]
    rows = [[0, 0], [1, 1], [1, 1], [2, 2], [2, 2], [2, 2]]
    assert joined["rows"] == ["torch.float32", rows] and joined["bfloat16"] == ["torch.bfloat16", rows]
    assert joined["array"] == [[row[0]] * 3 for row in rows]
    assert joined["texts"] == ["list", "00", "10", "11", "20", "21", "22"]
    assert joined["tuple of texts"][0] == "tuple" and joined["numbers"] == ["list", 0, 10, 11, 20, 21, 22]
    assert [box["name"] for box in joined["boxes"][1:]] == ["0-0", "1-0", "1-1", "2-0", "2-1", "2-2"]
    assert [len(its[1]) for its in joined["uneven"][1:]] == [2, 2, 3, 2, 3, 4]
    assert joined["parts"]["maps"] == ["list", joined["rows"], ["torch.float32", [[2 * a, 2 * b] for a, b in rows]]]
    assert joined["named"] == ["Pair", joined["rows"], joined["rows"]] and joined["held"][0] == "Held"
    assert (
        joined["one number"] == ["torch.float32", 2.5] and joined["text"] == "same" and joined["no items"] == ["list"]
    )
    assert len(joined["empty on rank 0"][1]) == 6
    assert all(str(text).startswith("ConfigError: ") for text in errors.values()), errors
