"""Losses of the global batch: 49 in which samples meet, on ranks and over batches, have the weights of one process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from harness import FORKED, PROGRAMS, run_ranks
from limits import Limit

PROGRAM = PROGRAMS / "torch" / "whole.py"
LOSSES = re.findall(
    r'^(?:@loss\ndef |    ")(\w+)(?=\(|": lambda model, o, y)', PROGRAM.read_text("utf-8"), re.MULTILINE
)
# each for what no other has: views, labels, proxies, orders, ratios, statistics of the batch; the others are thorough
OFTEN = (
    "clip", "swapped_clusters", "batch_hard_triplet", "survival", "median_and_spread", "dice", "detr", "advantages",
    "whitening", "lovasz", "a_bare_sum",
)  # fmt: skip
# engine, ranks, batches of an update
MORE = [
    ("horovod", 1, 1), ("horovod", 1, 3), ("horovod", 2, 3), ("horovod", 3, 1), ("horovod", 3, 3), ("ddp", 2, 1),
    ("ddp", 3, 3),
]  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[("horovod", 2, 1), *(pytest.param(way, marks=pytest.mark.thorough) for way in MORE)],
    ids=lambda way: "-".join(map(str, way)),
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[Any]]:
    engine, ranks, accumulate = request.param
    out = tmp_path_factory.mktemp("whole") / "found.json"
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    params = [its.params for its in specs if its is not None]
    names = [its["name"] for its in params if its.get("found") == request.param and "name" in its]
    program = [PROGRAM, engine, str(accumulate), out, *(names or OFTEN)]
    run_ranks(program, ranks, launcher=FORKED[engine], timeout_s=400).check()
    return ranks, [one for report in json.loads(out.read_text()) for one in report]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name not in OFTEN)) for name in LOSSES]
)
def test_a_loss_of_the_whole_batch_is_that_of_one_process(name: str, found: tuple[int, list[Any]]) -> None:
    _, reports = found
    mine = [one for one in reports if one["loss"] == name and one["way"] != "own rows"]
    assert mine
    for one in mine:
        assert max(one["errors"]) <= 1e-10, one


def test_a_rank_by_itself_has_another_loss(found: tuple[int, list[Any]], limit: Limit) -> None:
    """The twin: without the whole batch a loss is refused, or its weights are others."""
    ranks, reports = found
    alone = [one for one in reports if one["way"] == "own rows"]
    assert len(alone) == ranks * len({one["loss"] for one in reports}) >= ranks
    if ranks > 1:
        whole = [max(one["errors"]) for one in reports if one["way"] != "own rows"]
        limit("T34", f"losses in which samples meet, {ranks} ranks, the whole batch", exact=max(whole))
        assert all("refused" in one or one["errors"][0] > 1e-6 for one in alone), alone


@pytest.mark.parametrize(
    ("engine", "ranks", "accumulate"),
    [pytest.param(*way, marks=[pytest.mark.thorough] * (way not in MORE[2:4])) for way in MORE],
)
def test_means_with_divisors_of_their_own(
    engine: str, ranks: int, accumulate: int, tmp_path: Path, limit: Limit
) -> None:
    out = tmp_path / "found.json"
    program = PROGRAMS / "torch" / "terms.py"
    run_ranks([program, engine, str(accumulate), out], ranks, launcher=FORKED[engine], timeout_s=120).check()
    worst = 0.0
    for report in json.loads(out.read_text()):
        worst = max(worst, *report["loop"], *report["call"])
        assert worst <= 1e-10, report
        assert ranks * accumulate == 1 or max(report["one weight"]) > 1e-4, report  # the twin
    limit("T30", f"three means with divisors of their own, {ranks} ranks, accumulate={accumulate}", exact=worst)


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
