"""Streams, samplers and batch samplers on real ranks: what one process sees, updates exact at the tail.

One launch a world size runs all cases (`programs/torch/streams.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import PROGRAMS, run_ranks
from shards import EACH, SHARDS, write_shards

RUNS = (2, 1)
RANKS = [1, 2]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    folder = tmp_path_factory.mktemp("streams")
    shards = write_shards(folder / "shards")
    found = {}
    for size in RUNS:
        out = folder / f"{size}.json"
        program: list[str | Path] = ["-W", "ignore", PROGRAMS / "torch" / "streams.py", out, shards]
        run_ranks(program, size, timeout_s=150).check()
        found[size] = json.loads(out.read_text())
    return found


def close(pairs: Any) -> None:
    assert max(abs(a - b) for ours, plain in pairs for a, b in zip(ours, plain, strict=True)) < 1e-12


def test_tar_shards_are_dealt_as_one_process_reads_them(results: dict[int, Any]) -> None:
    one, more_workers = results[1]["shards_of_tar"]
    assert one == more_workers == results[2]["shards_of_tar"][0] == results[2]["shards_of_tar"][1]
    for epoch in (one[:2], one[2:]):  # the tail of 30 records is dropped
        labels = [label for step in epoch for _, label in step]
        assert [len(step) for step in epoch] == [12, 12] and len(set(labels)) == 24
    shards = [[step[0][1] // EACH for step in one[at : at + 2]] for at in (0, 2)]
    assert shards[0] != shards[1]  # another order of shards in the next epoch
    assert one[0][0][0] != one[2][0][0] and all(label < SHARDS * EACH for step in one for _, label in step)


@pytest.mark.parametrize("size", RANKS)
def test_what_shares_itself_out_among_workers_is_whole(results: dict[int, Any], size: int) -> None:
    first, second, differ = results[size]["hugging_face"]
    assert first == second == list(range(25)) and differ


@pytest.mark.parametrize("size", RANKS)
def test_updates_are_exact(results: dict[int, Any], size: int) -> None:
    found = results[size]["updates_are_exact"]
    assert len(found) == 3
    close(found.values())


def test_samplers_name_the_same_samples_to_any_number_of_ranks(results: dict[int, Any]) -> None:
    weighted, own, of_epoch = results[1]["samplers"]
    assert results[2]["samplers"] == [weighted, own, of_epoch]
    assert [len(step) for step in weighted] == [12, 12, 6] * 2 and weighted[:3] != weighted[3:]
    drawn = [index for step in weighted for _, index in step]
    assert len(set(drawn)) < 25 and sum(drawn) / len(drawn) > 13  # with replacement, by weights that grow
    for epoch in (own[:3], own[3:]):
        assert sorted(index for step in epoch for _, index in step) == list(range(25))
    assert own[:3] != own[3:]
    assert [[index for _, index in step] for step in of_epoch] == [[3, 1, 2], [4, 1, 2]]


@pytest.mark.parametrize("size", RANKS)
def test_batches_of_the_users_are_weighed_exactly(results: dict[int, Any], size: int) -> None:
    found, of_torch = results[size]["batches_of_the_users"]
    close(found)
    assert [[index for _, index in step] for step in of_torch] == [
        list(range(at, min(at + 10, 25))) for at in (0, 10, 20)
    ]


@pytest.mark.parametrize("size", RANKS)
def test_evaluation_of_a_stream(results: dict[int, Any], size: int) -> None:
    ours, by_hand = results[size]["evaluation"]
    assert ours == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("size", RANKS)
def test_predictions_are_those_of_one_process(results: dict[int, Any], size: int) -> None:
    assert results[size]["prediction"] < 1e-12


@pytest.mark.parametrize("size", RANKS)
def test_refusals(results: dict[int, Any], size: int) -> None:
    assert results[size]["refusals"] and results[size]["streams_that_part_later"]
