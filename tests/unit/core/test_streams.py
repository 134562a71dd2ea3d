"""Streams are dealt as map-style data is: the same samples to the same ranks, with the same weights; pure."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.sharding import Plan
from hvdtrain.world.records import BATCH_SAMPLER, HEAD, STREAM, CountedRecords, head, stream_of
from hvdtrain.world.streams import StreamPlan, StreamStep, walk


def steps_of(
    records: Any, size: int, batch: int, rank: int, *, begin: int = 0, ahead: int = 1, **options: Any
) -> list[tuple[StreamStep, list[Any]]]:
    plan = StreamPlan(0, size, batch, shuffle=False, **options)
    noted = CountedRecords(iter(records), kind=BATCH_SAMPLER if plan.whole_batches else STREAM)
    return list(walk(noted, plan, 0, begin, rank=rank, ahead=ahead))


@pytest.mark.parametrize("tail", ["weighted", "drop"])
def test_dealt_as_a_map_style_plan_deals(tail: Any) -> None:
    """Every length of a tail, any place to begin at, any update: what a `Plan` that knows the length says."""
    for size, batch in ((1, 3), (2, 2), (3, 2), (5, 3)):
        for samples in range(size * batch, 3 * size * batch + 2):
            for begin in (0, size, samples):
                known = Plan(samples, size, batch, shuffle=False, tail=tail)
                for rank in range(size):
                    found = steps_of(range(samples), size, batch, rank, begin=begin, ahead=3, tail=tail)
                    expected = known.step_slices(0, begin, rank=rank)
                    assert len(found) == len(expected)
                    for (step, own), its in zip(found, expected, strict=True):
                        assert own == its.indices.tolist() == step.indices.tolist()
                        assert (step.number, step.samples_done) == (its.number, its.samples_done)
                        assert step.place_after == its.place_after
                        assert [step.update(a) for a in (1, 2, 3, 4)] == [its.update(a) for a in (1, 2, 3, 4)]


def test_a_records_parts_are_known_by_name() -> None:
    """A resumed run compares what it walks past: a picture that has become the mask is another record."""

    def digest(*records: Any) -> int:
        noted = CountedRecords(iter(records))
        assert len(list(noted)) == len(records)
        return noted.digest

    one, two = {"picture": 1, "weight": 2}, {"mask": 1, "weight": 2}
    assert digest(one, one) == digest(dict(one), one) != digest(one, two)
    assert digest((1, 2)) != digest([[1], 2])


def test_little_is_held_of_a_step() -> None:
    """A rank keeps what may become its own: of a step of 64 x 4 records never more than a quarter."""
    alive = most = 0

    class Record:
        def __init__(self) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    for rank in (0, 31, 63):
        for _ in walk(
            CountedRecords(Record() for _ in range(256)), StreamPlan(0, 64, 4, shuffle=False), 0, 0, rank=rank, ahead=1
        ):
            pass
    assert most <= 64 + HEAD + 8, most


def test_batches_of_the_users_are_dealt_whole() -> None:
    batches = [[5, 3, 1], [7], [2, 4, 6, 8]]
    found = [steps_of(batches, 2, 2, rank, whole_batches=4) for rank in (0, 1)]
    assert [own for _, own in found[0]] == [[5, 3], [7], [2, 4]]
    assert [own for _, own in found[1]] == [[1], [], [6, 8]]
    for its in found:
        assert [(step.global_samples, step.samples_done) for step, _ in its] == [(3, 3), (1, 4), (4, 8)]
    later = [steps_of(batches, 2, 2, 0, whole_batches=4, begin=begin) for begin in (3, 4)]
    assert [[own for _, own in its] for its in later] == [[[7], [2, 4]], [[2, 4]]]
    wide = steps_of(batches, 2, 2, 0, whole_batches=4, ahead=2)
    assert [step.update(2) for step, _ in wide] == [(4, False), (4, True), (4, True)]
    assert [step.update(3) for step, _ in wide] == [(8, False), (8, False), (8, True)]


def test_a_run_goes_on_within_a_batch_of_the_users() -> None:
    """Its batches were others: what is left of the one at hand comes first, and the digests are those of indices."""
    order = [5, 3, 1, 7, 2, 4]
    whole = steps_of([order[:2], order[2:]], 1, 4, 0, whole_batches=4)
    for batches, left in (([order[:3], order[3:]], [order[2:3], order[3:]]), ([order], [order[2:]])):
        cut = steps_of(batches, 1, 4, 0, whole_batches=4, begin=2)
        assert [own for _, own in cut] == left
        assert cut[-1][0].digest == whole[-1][0].digest and cut[-1][0].samples_done == 6
    heads = [head(partial(iter, its), kind=BATCH_SAMPLER) for its in ([order], [order[:2], order[2:]])]
    assert heads[0] == heads[1] and heads[0].records == 6


def test_what_is_read_anew() -> None:
    class Told:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            return iter([self.epoch, 7])

    assert [list(stream_of(Told())(epoch)) for epoch in (0, 3)] == [[0, 7], [3, 7]]
    assert list(stream_of(lambda: [1, 2])(5)) == [1, 2]
    assert list(stream_of(lambda epoch: [epoch])(5)) == [5]
    assert list(stream_of(lambda epoch=1: [epoch])(5)) == [5]
    assert list(stream_of(lambda path="a": [path])(5)) == ["a"]  # the idiom that binds a loop's variable
    for wrong in (iter([1]), (n for n in [1]), {1, 2}, "text", 5):
        with pytest.raises(ConfigError, match="must be readable again"):
            stream_of(wrong)

    def batches() -> Any:
        yield 1

    with pytest.raises(ConfigError, match=r"fix: loader\(batches\), without \(\);\n"):
        stream_of(batches())


def test_the_head_tells_orders_and_contents_apart_but_not_what_is_drawn() -> None:
    rows = [{"number": n, "text": "x" * n} for n in range(20)]
    assert head(lambda: iter(rows)) == head(lambda: iter(rows[:9]))
    for other in (rows[::-1], rows[1:], [{**row, "text": "y" * 3} for row in rows], rows[:3]):
        assert head(lambda: iter(rows)).digest != head(partial(iter, other)).digest
    draw = random.Random(1)
    noisy = [head(lambda: ({"n": n, "x": draw.random()} for n in range(9))) for _ in range(2)]
    assert noisy[0] == noisy[1] and noisy[0].unstable == {"['x']"}
    shards = [{"url": "first.tar", "text": f"{n}"} for n in range(100)]  # one shard tells no order from another
    for records in (range(100), shards):
        with pytest.raises(ConfigError, match="read twice"):
            head(partial(lambda records: iter(draw.sample(records, 10)), records))
    assert head(lambda: iter(draw.sample(shards, 2)), 2).unstable == {"['text']"}  # two may be alike by chance
