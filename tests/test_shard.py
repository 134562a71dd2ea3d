"""Every sample exactly once, whatever the number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain import ConfigError, Plan, contiguous
from hvdtrain.shard import Share

GRID = list(itertools.product(range(41), range(1, 5), range(1, 6)))


def deal(plan: Plan, epoch: int, consumed: int = 0) -> list[list[Share]]:
    """Return shares by step, then rank."""
    by_rank = [plan.step_slices(epoch, consumed, rank=rank) for rank in range(plan.size)]
    assert len({len(shares) for shares in by_rank}) == 1, "ranks would take different numbers of steps and hang"
    return [list(step) for step in zip(*by_rank, strict=True)]


def seen(steps: list[list[Share]]) -> list[int]:
    return [int(index) for step in steps for share in step for index in share.indices]


def padded(plan: Plan, epoch: int, consumed: int = 0) -> list[list[Share]]:
    """Negative twin: what PyTorch's DistributedSampler does, repeat samples to fill the last step."""
    steps = deal(plan, epoch, consumed)
    short = [share for step in steps for share in step if len(share.indices) < plan.per_rank_batch]
    extra = plan.order(epoch)[: sum(plan.per_rank_batch - len(share.indices) for share in short)]
    return [*steps, [Share(extra, len(extra))]]


def exactly_once(dealer: Callable[..., list[list[Share]]]) -> None:
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
        assert [[i for share in step for i in share.indices] for step in many] == [
            step[0].indices.tolist() for step in one
        ]
        assert all(share.global_count == step[0].global_count for step, other in zip(one, many, strict=True)
                   for share in other)  # fmt: skip


def test_negative_twin_another_seed_takes_other_samples() -> None:
    assert seen(deal(Plan(40, 2, 5, seed=2), 1))[:10] != seen(deal(Plan(40, 2, 5, seed=3), 1))[:10]


def test_shares_are_full_but_for_the_tail_which_is_even() -> None:
    for samples, size, batch in GRID:
        steps = deal(Plan(samples, size, batch), 0)
        for number, step in enumerate(steps):
            counts = [len(share.indices) for share in step]
            assert {share.global_count for share in step} == {sum(counts)}
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
        """A checkpoint of today must be resumed by the numpy of tomorrow: these numbers are a promise."""
        assert Plan(10, 1, 1, seed=0).order(0).tolist() == FROZEN_00
        assert Plan(10, 1, 1, seed=7).order(3).tolist() == FROZEN_73

    def test_without_shuffle_it_is_the_data_sets(self) -> None:
        order = Plan(5, 1, 1, shuffle=False).order(3)
        assert order.tolist() == [0, 1, 2, 3, 4] and order.dtype == np.int64

    def test_type(self) -> None:
        assert Plan(5, 1, 1).order(0).dtype == np.int64

    def test_looks_random(self) -> None:
        """Mean displacement of a random permutation is a third of its length; sorted data would have 0."""
        order = Plan(30_000, 1, 1, seed=1).order(0)
        assert abs(np.abs(order - np.arange(30_000)).mean() / 10_000 - 1) < 0.03
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02

    def test_negative_epoch(self) -> None:
        with pytest.raises(ConfigError, match="epoch"):
            Plan(5, 1, 1).order(-1)


FROZEN_00 = [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
FROZEN_73 = [2, 5, 9, 7, 3, 0, 6, 8, 4, 1]


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


def test_numpy_integers_are_integers() -> None:
    assert Plan(np.int64(10), np.int32(2), np.int64(2)).steps() == 3  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_out_of_range(rank: int) -> None:
    with pytest.raises(ConfigError, match="rank"):
        Plan(10, 2, 2).step_slices(0, rank=rank)
    with pytest.raises(ConfigError, match="rank"):
        contiguous(10, rank, 2)


@pytest.mark.parametrize("consumed", [-1, 11])
def test_consumed_out_of_range_names_the_likely_cause(consumed: int) -> None:
    with pytest.raises(ConfigError, match="another data set"):
        Plan(10, 2, 2).step_slices(0, consumed, rank=0)
