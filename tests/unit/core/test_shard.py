"""Every sample exactly once, whatever the number of ranks."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import Limit

from hvdtrain import ConfigError, Plan, contiguous
from hvdtrain.core.sharding import SMALL, Step, tail_pieces

GRID = list(itertools.product(range(41), range(1, 5), range(1, 6)))


def deal(plan: Plan, epoch: int, consumed: int = 0) -> list[list[Step]]:
    """Return parts by step, then rank."""
    by_rank = [plan.step_slices(epoch, consumed, rank=rank) for rank in range(plan.size)]
    assert len({len(parts) for parts in by_rank}) == 1, "ranks would take different numbers of steps and hang"
    return [list(step) for step in zip(*by_rank, strict=True)]


def seen(steps: list[list[Step]]) -> list[int]:
    return [int(index) for step in steps for part in step for index in part.indices]


def padded(plan: Plan, epoch: int, consumed: int = 0) -> list[list[Step]]:
    """Negative twin: what PyTorch's DistributedSampler does, repeat samples to fill the last step."""
    steps = deal(plan, epoch, consumed)
    short = [part for step in steps for part in step if len(part.indices) < plan.per_rank_batch]
    extra = min(plan.samples, sum(plan.per_rank_batch - len(part.indices) for part in short))
    return [*steps, [Step(plan, epoch, consumed, len(steps), 0, extra, extra)]]


def exactly_once(dealer: Callable[..., list[list[Step]]]) -> None:
    for samples, size, batch in GRID:
        plan = Plan(samples, size, batch, seed=1)
        steps = dealer(plan, epoch=2)
        assert sorted(seen(steps)) == list(range(samples)), plan


def test_an_epoch_has_every_sample_exactly_once() -> None:
    exactly_once(deal)


def test_negative_twin_padding_repeats_samples() -> None:
    with pytest.raises(AssertionError):
        exactly_once(padded)


def test_from_any_point_of_an_epoch() -> None:
    for samples, size, batch in GRID:
        plan = Plan(samples, size, batch, seed=1)
        order = plan.order(0).tolist()
        for consumed in range(samples + 1):
            steps = deal(plan, 0, consumed)
            assert len(steps) == plan.steps(consumed)
            assert seen(steps) == order[consumed:], (plan, consumed)


def test_when_the_world_changes_in_the_middle_of_an_epoch() -> None:
    sizes = list(itertools.product(range(1, 5), repeat=2))
    for samples, batch in itertools.product((0, 1, 7, 24, 40), (1, 3, 5)):
        for before, after in sizes:
            first = Plan(samples, before, batch, seed=4)
            for done in range(first.steps() + 1):
                consumed = min(samples, done * first.global_batch)
                part = seen(deal(first, 3)[:done])
                rest = seen(deal(Plan(samples, after, batch, seed=4), 3, consumed))
                assert sorted(part + rest) == list(range(samples))


def test_n_ranks_take_the_samples_of_one_process_step_by_step() -> None:
    for samples, size, batch in GRID:
        many = deal(Plan(samples, size, batch, seed=2), 1)
        one = deal(Plan(samples, 1, size * batch, seed=2), 1)
        assert [[i for part in step for i in part.indices] for step in many] == [
            step[0].indices.tolist() for step in one
        ]
        assert all(part.global_samples == step[0].global_samples for step, other in zip(one, many, strict=True)
                   for part in other)  # fmt: skip


def test_parts_are_full_but_for_the_tail_which_is_even() -> None:
    assert [tail_pieces(samples, 8, 3) for samples in (1, 3, 4, 6, 7)] == [1, 1, 2, 2, 3]
    for samples, size, batch in GRID:
        steps = deal(Plan(samples, size, batch), 0)
        for number, step in enumerate(steps):
            counts = [len(part.indices) for part in step]
            assert {part.global_samples for part in step} == {sum(counts)}
            if number < len(steps) - 1:
                assert counts == [batch] * size
            assert max(counts) - min(counts) <= 1
            assert counts == sorted(counts, reverse=True), "lower ranks take one more"


def test_drop_leaves_out_the_tail_only() -> None:
    for samples, size, batch in GRID:
        if 0 < samples < size * batch:
            with pytest.raises(ConfigError, match="at least one full global step"):
                Plan(samples, size, batch, tail="drop")
            continue
        plan = Plan(samples, size, batch, tail="drop")
        steps = deal(plan, 0)
        assert plan.steps() == len(steps) == samples // (size * batch)
        assert seen(steps) == plan.order(0).tolist()[: len(steps) * size * batch]


class TestOrder:
    def test_is_a_permutation_and_depends_on_seed_and_epoch_only(self) -> None:
        orders = {
            (seed, epoch): tuple(Plan(50, size, batch, seed=seed).order(epoch).tolist())
            for size, batch in ((1, 8), (3, 2))
            for seed in (0, 1, 2**31)
            for epoch in (0, 1, 99)
        }
        assert len(set(orders.values())) == 9
        assert all(sorted(order) == list(range(50)) for order in orders.values())

    def test_never_changes(self) -> None:
        """A checkpoint of today must be resumed by the numpy of tomorrow: these numbers are a promise.

        When they were frozen, computed orders of 20 seeds passed chi-square tests of places, neighbours and seeds.
        """
        assert Plan(10, 1, 1, seed=0).order(0).tolist() == FROZEN_00
        assert Plan(10, 1, 1, seed=7).order(3).tolist() == FROZEN_73
        assert Plan(SMALL + 1, 1, 1, seed=7).order(3, 0, 5).tolist() == FROZEN_LARGE


class TestComputedOrder:
    """Orders of large data sets, of which only the positions that are asked for are ever computed."""

    @given(st.integers(SMALL + 1, 2**48), st.integers(0, 2**63), st.data())
    @settings(max_examples=150)
    def test_a_piece_is_the_same_alone_and_repeats_nothing(self, samples: int, seed: int, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, samples - 1000))
        plan = Plan(samples, 1, 1, seed=seed)
        piece = plan.order(3, start, start + 1000)
        assert piece.dtype == np.int64 and piece.min() >= 0 and piece.max() < samples
        assert len(np.unique(piece)) == 1000
        assert np.array_equal(plan.order(3, start + 400, start + 401), piece[400:401])

    def test_a_hundred_million_samples(self, limit: Limit) -> None:
        """On each of 4 ranks, and going on at 3; the order of 1e7 samples took 3.7 s, each epoch."""
        samples = 10**8
        plan, after = Plan(samples, 4, 64, seed=1), Plan(samples, 3, 64, seed=1)
        tracemalloc.start()
        start = time.perf_counter()
        parts = plan.step_slices(2, rank=3)
        first, last = parts[0], parts[-1]
        seconds = time.perf_counter() - start
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert seconds < 0.5 and peak < 50 * 2**20
        assert len(parts) == 390_625 and first.global_samples == last.global_samples == 256
        consumed = 390_000 * 256
        rest = [
            np.concatenate([part.indices for part in parts])
            for parts in (
                [again.step_slices(2, consumed, rank=rank)[0] for rank in range(again.size)] for again in (plan, after)
            )
        ]
        assert np.array_equal(rest[0][: len(rest[1])], rest[1])
        limit(
            "T18", "an epoch over 1e8 samples begins", mended=f"{seconds * 1e3:.0f} ms, {peak / 2**20:.1f} MiB a rank"
        )


FROZEN_00 = [0, 9, 7, 5, 4, 6, 1, 8, 3, 2]
FROZEN_73 = [3, 7, 8, 2, 5, 1, 6, 4, 9, 0]
FROZEN_LARGE = [8830, 39545, 40808, 2230, 63403]


@given(st.integers(0, 2000), st.integers(1, 64))
@settings(max_examples=200)
def test_contiguous_pieces_are_even_and_in_order(samples: int, size: int) -> None:
    pieces = [range(samples)[contiguous(samples, rank, size)] for rank in range(size)]
    assert [i for piece in pieces for i in piece] == list(range(samples))
    lengths = [len(piece) for piece in pieces]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"samples": -1}, {"samples": 1.5}, {"size": 0}, {"per_rank_batch": 0}, {"per_rank_batch": -3}, {"seed": -1},
        {"per_rank_batch": True}, {"tail": "pad"},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_that_mean_nothing(arguments: dict) -> None:
    with pytest.raises(ConfigError):
        Plan(**{"samples": 10, "size": 2, "per_rank_batch": 2, **arguments})


def test_an_update_has_no_more_samples_than_an_epoch() -> None:
    plan = Plan(64, 2, 16)
    assert [plan.update_samples(passes) for passes in (1, 2, 3)] == [32, 64, 64]
    assert Plan(64, 1, 512).update_samples(1) == 64
