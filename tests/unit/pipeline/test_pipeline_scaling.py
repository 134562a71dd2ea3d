"""A step on many ranks: closed forms, and an oracle that goes from event to event."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction
from statistics import fmean
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.pipeline.plan.costs import Link, ring_link
from hvdtrain.pipeline.plan.scaling import (
    BucketTiming,
    MeasuredStep,
    Network,
    Way,
    exchange,
    exposed,
    predict,
    remedies,
)

BETWEEN, INSIDE = Link(30e-6, 1.25e9), Link(5e-6, 12.5e9)
NETWORK = Network(BETWEEN, INSIDE, per_host=8)
WHOLE = (BucketTiming(170e6, 1.0),)
EVEN = tuple(BucketTiming(17e6, n / 10) for n in range(1, 11))


def oracle(
    buckets: list[tuple[int, Fraction]], cycle: Fraction, negotiation: Fraction, most: int, seconds: dict[int, Fraction]
) -> list[tuple[Fraction, Fraction, int]]:
    """Cycle after cycle: look at what is ready, agree, send; exact. Returns begin, end and bytes of each sum."""
    now, left, sent = Fraction(0), list(buckets), []
    while left:
        ready = [its for its in left if its[1] <= now]
        left = left[len(ready) :]
        end = now + negotiation
        while ready:
            together = [ready.pop(0)[0]]
            while ready and sum(together) + ready[0][0] <= most:
                together.append(ready.pop(0)[0])
            begin, end = end, end + seconds[sum(together)]
            sent.append((begin, end, sum(together)))
        if not cycle and not negotiation and left and end <= now:
            end = left[0][1]  # it would ask again and again
        now = max(end, now + cycle)
    return sent


EIGHTHS = st.integers(0, 40).map(lambda n: Fraction(n, 8))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), EIGHTHS), min_size=1, max_size=9),
    EIGHTHS, EIGHTHS, st.integers(0, 20), st.integers(0, 5), st.integers(0, 8),
)  # fmt: skip
def test_the_events_are_those_of_an_oracle(
    given_: list[tuple[int, Fraction]], cycle: Fraction, negotiation: Fraction, most: int, latency: int, rate: int
) -> None:
    """In eighths of a second, which floats hold exactly."""
    buckets = sorted(given_, key=lambda its: its[1])
    seconds = {size: Fraction(latency, 8) + size * Fraction(rate, 8) for size in range(100)}
    found = exchange(
        [BucketTiming(size, float(ready)) for size, ready in buckets], 1.0, lambda size: float(seconds[int(size)]),
        cycle_s=float(cycle), negotiation_s=float(negotiation), fusion_bytes=most,
    )  # fmt: skip
    wanted = oracle(buckets, cycle, negotiation, most, seconds)
    exact = [(Fraction(its.begin_s), Fraction(its.end_s), int(its.size_bytes)) for its in found]
    assert exact == wanted
    backward = Fraction(random.Random(len(buckets)).randrange(40), 8)
    on_link = sum((max(Fraction(0), end - max(begin, backward)) for begin, end, _ in wanted), Fraction(0))
    after = max(Fraction(0), wanted[-1][1] - backward)
    assert exposed(found, float(backward)) == (float(on_link), float(after - on_link))


@pytest.mark.parametrize("ranks", [2, 8, 9, 512, 4096])
def test_one_bucket_at_the_end_is_the_rings_formula(ranks: int) -> None:
    """2 (n-1)/n of the bytes through the narrowest link, and 2 (n-1) hops, one a host between hosts."""
    hosts = math.ceil(ranks / 8)
    narrow, hop_s = (1.25e9, (hosts * 30e-6 + (ranks - hosts) * 5e-6) / ranks) if hosts > 1 else (12.5e9, 5e-6)
    wanted = 2 * (ranks - 1) / ranks * 170e6 / narrow + 2 * (ranks - 1) * hop_s
    step = predict(MeasuredStep((0.31,), 0.0, WHOLE), NETWORK, ranks)
    agreeing = (1 + math.ceil(math.log2(ranks))) * (30e-6 if hosts > 1 else 5e-6)
    assert step.exposed_communication_s == pytest.approx(wanted) and step.negotiation_s == pytest.approx(agreeing)
    assert step.step_s == pytest.approx(0.31 + wanted + agreeing)


def test_the_other_ways_by_hand() -> None:
    hierarchical, tree = (replace(NETWORK, way=way).all_reduce_s(64e6, 64) for way in ("hierarchical", "tree"))
    inside, across = 14 / 8 * 64e6 / 12.5e9 + 14 * 5e-6, 14 / 8 * 64e6 / 1.25e9 + 14 * 30e-6
    assert hierarchical == pytest.approx(inside + across)
    assert tree == pytest.approx(2 * (7 * 5e-6 + 3 * 30e-6 + 64e6 / 1.25e9))
    assert all(replace(NETWORK, way=way).all_reduce_s(64e6, 1) == 0 for way in ("ring", "hierarchical", "tree"))
    assert ring_link(8, 8, INSIDE, BETWEEN) == INSIDE and ring_link(8, 1, INSIDE, BETWEEN) == BETWEEN


def test_sums_hide_behind_the_backward_pass() -> None:
    """A sum of 17 MB takes 2.4 ms inside a host: the last alone is left; none has a backward pass to hide behind."""
    even = predict(MeasuredStep((0.31,), 0.2, EVEN), NETWORK, 8).exposed_communication_s
    assert even == pytest.approx(NETWORK.all_reduce_s(17e6, 8))
    bare = predict(MeasuredStep((0.31,), 0.0, EVEN), NETWORK, 8).exposed_communication_s
    assert bare == pytest.approx(10 * even)


def test_the_first_rank_hears_one_rank_after_another_in_every_cycle() -> None:
    heard = replace(NETWORK, coordinator_s=1e-6)
    assert heard.negotiation_s(4096) - NETWORK.negotiation_s(4096) == pytest.approx(4095e-6)
    slow = replace(NETWORK, coordinator_s=1e-3)
    assert predict(MeasuredStep((0.31,), 0.2, WHOLE), slow, 512).negotiation_s > 0.5


@given(st.lists(st.floats(0.1, 9), min_size=1, max_size=20), st.integers(1, 4096))
def test_the_slowest_rank(compute_s: list[float], ranks: int) -> None:
    """The maximum of draws from what was measured: its distribution function is the single one's to the ranks."""
    found = MeasuredStep(tuple(compute_s), 0, ()).slowest_s(ranks)
    values = sorted(set(compute_s))
    below = [(sum(its <= value for its in compute_s) / len(compute_s)) ** ranks for value in values]
    wanted = math.fsum(v * (p - q) for v, p, q in zip(values, below, [0.0, *below], strict=False))
    assert found == pytest.approx(wanted) and found <= max(compute_s) * (1 + 1e-12)
    assert found >= fmean(compute_s) * (1 - 1e-12)


def test_the_slowest_rank_by_drawing() -> None:
    draw, compute_s = random.Random(0), (1.0, 1.0, 1.1, 2.0)
    mean = fmean(max(draw.choices(compute_s, k=4)) for _ in range(20_000))
    assert MeasuredStep(compute_s, 0, ()).slowest_s(4) == pytest.approx(mean, abs=0.02)
    assert predict(MeasuredStep(compute_s, 0, ()), NETWORK, 4).straggler_s == pytest.approx(mean - 1.275, abs=0.02)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1)), max_size=8),
    st.lists(st.floats(0.1, 2), min_size=1, max_size=5), st.sampled_from(get_args(Way)),
    st.integers(1, 9), st.integers(1, 5000), st.integers(1, 500), st.sampled_from([0.0, 0.07]),
)  # fmt: skip
def test_more_ranks_are_never_more_efficient(
    pairs: list[tuple[float, float]],
    compute_s: list[float],
    way: Way,
    per_host: int,
    ranks: int,
    more: int,
    backward_s: float,
) -> None:
    """Of whole hosts, where nothing is fused; but for where in a cycle a bucket becomes ready."""
    buckets = tuple(BucketTiming(*its) for its in sorted(pairs, key=lambda its: its[1]))
    training = MeasuredStep(tuple(compute_s), backward_s, buckets)
    network = replace(NETWORK, way=way, per_host=per_host)
    few, many = (predict(training, network, count * per_host) for count in (ranks, ranks + more))
    cycle_s = network.negotiation_s(many.ranks) if backward_s else 0.0
    assert few.efficiency <= 1 and few.step_s <= (many.step_s + cycle_s) * (1 + 1e-9)


def test_what_would_help_is_simulated() -> None:
    training, ranks = MeasuredStep((0.31,), 0.2, EVEN, 32), 512
    now, found = predict(training, NETWORK, ranks), remedies(training, NETWORK, ranks)
    assert [its.efficiency for its in found.values()] == sorted(
        (its.efficiency for its in found.values()), reverse=True
    )
    ways = {"a hierarchical all-reduce", "a tree all-reduce"}
    assert set(found) == ways | {"twice the batch", "two batches an update", "gradients in 16 bits"}
    assert all(its.efficiency > now.efficiency for its in found.values())
    assert found["two batches an update"].exposed_communication_s == now.exposed_communication_s
    assert found["twice the batch"].step_s < found["two batches an update"].step_s
    assert found["twice the batch"].samples == 64
