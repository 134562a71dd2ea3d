"""Losses of the global batch: 49 in which samples meet, on ranks and over batches, have the weights of one process."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from harness import PROGRAMS, run_ranks

PROGRAM = PROGRAMS / "torch" / "whole.py"
LAUNCHERS = {"horovod": "horovodrun", "ddp": "torchrun"}
LOSSES = re.findall(r"^@loss\ndef (\w+)", PROGRAM.read_text(encoding="utf-8"), re.MULTILINE)
# engine, ranks, batches of an update; the others stand for what they add
WAYS = [("horovod", 2, 1), ("horovod", 3, 3)]
MORE = [("horovod", 1, 1), ("horovod", 1, 3), ("horovod", 2, 3), ("horovod", 3, 1), ("ddp", 2, 1), ("ddp", 3, 3)]


@pytest.fixture(
    scope="module",
    params=[*WAYS, *(pytest.param(way, marks=pytest.mark.thorough) for way in MORE)],
    ids=lambda way: "-".join(map(str, way)),
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[Any]]:
    engine, ranks, accumulate = request.param
    out = tmp_path_factory.mktemp("whole") / "found.json"
    run_ranks([PROGRAM, engine, accumulate, out], ranks, launcher=LAUNCHERS[engine], timeout_s=400).check()
    return ranks, [one for report in json.loads(out.read_text()) for one in report]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_the_whole_batch_is_that_of_one_process(name: str, found: tuple[int, list[Any]]) -> None:
    _, reports = found
    mine = [one for one in reports if one["loss"] == name and one["way"] != "own rows"]
    assert mine
    for one in mine:
        assert max(one["errors"]) <= 1e-10, one


def test_a_rank_by_itself_has_another_loss(found: tuple[int, list[Any]]) -> None:
    """The twin: without the whole batch a loss is refused, or its weights are others."""
    ranks, reports = found
    alone = [one for one in reports if one["way"] == "own rows"]
    assert len(alone) == ranks * len(LOSSES)
    if ranks > 1:
        assert all("refused" in one or one["errors"][0] > 1e-6 for one in alone), alone
