"""The partition against brute force: every contiguous cut, summed by hand."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_pipeline_plan import CHAIN, modes, real_peaks

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.plan.costs import Curve, Device, Link, SegmentCost
from hvdtrain.pipeline.plan.partition import partition
from hvdtrain.pipeline.plan.schedule import actions, micro_batch_sizes, recomputed


def cuts(segments: int, stages: int) -> Iterator[tuple[int, ...]]:
    for ends in itertools.combinations(range(1, segments), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *ends, segments)))


def by_hand(costs, devices, cut, *, batch, micro_batches, schedule, remat, link) -> tuple[float, Sequence[float]]:
    """The bottleneck of one cut; and the bytes of each stage, which test_pipeline_plan compares with an allocator's."""
    sizes = micro_batch_sizes(batch, micro_batches)
    slowest, begin = 0.0, 0
    for stage, count in enumerate(cut):
        again = recomputed(remat, actions(schedule, stage, len(cut), micro_batches))
        mine, begin = costs[begin : begin + count], begin + count
        passes = sum(
            cost.forward_s(size) * (2 if micro in again else 1) + cost.backward_s(size)
            for cost in mine
            for micro, size in enumerate(sizes)
        )
        sent = sum(link.seconds(mine[-1].output_bytes(size)) for size in sizes) if stage < len(cut) - 1 else 0.0
        slowest = max(slowest, passes / devices[stage].speed, sent)
    run = {"batch": batch, "micro_batches": micro_batches, "schedule": schedule, "remat": remat}
    return slowest, partition(costs, devices, balance=cut, **run).stage_bytes


def fits(peaks: Sequence[float], devices: Sequence[Device]) -> bool:
    limits = [math.inf if device.memory_bytes is None else device.memory_bytes for device in devices]
    return all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))


few = st.integers(0, 6)  # so that ties are common
segments = st.builds(
    lambda forward, backward, fixed, kept, out: SegmentCost(
        "s", Curve.per_sample(forward), Curve(((1, backward + 1), (4, 2 * backward + 1))), fixed_bytes=fixed,
        activation_bytes=Curve.per_sample(kept), output_bytes=Curve.per_sample(out),
    ),
    few, few, st.integers(0, 50), few, few,
)  # fmt: skip
problems = {
    "costs": st.lists(segments, min_size=1, max_size=8),
    "speeds": st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=4),
    "limit": st.sampled_from([None, 60, 120, 240]),
    "link": st.sampled_from([Link(), Link(0.5, 1.0), Link(0, 4.0)]),
    "batch": st.integers(4, 12),
    "micro_batches": st.integers(1, 4),
    **modes,
}


@pytest.mark.parametrize("balance", ["time", "memory"])
@given(**problems)
def test_it_is_the_best_of_all_cuts(balance, costs, speeds, limit, link, **run):
    assume(len(speeds) <= len(costs))
    devices = [Device(str(at), speed, limit, ahead=at % 3) for at, speed in enumerate(speeds)]
    every = [by_hand(costs, devices, cut, link=link, **run) for cut in cuts(len(costs), len(devices))]
    possible = [(slowest, max(peaks)) for slowest, peaks in every if fits(peaks, devices)]
    if not possible:
        with pytest.raises(ConfigError, match="every stage must fit"):
            partition(costs, devices, links=link, balance=balance, **run)
        return
    found = partition(costs, devices, links=link, balance=balance, **run)
    slowest, peaks = by_hand(costs, devices, found.sizes, link=link, **run)
    assert (found.bottleneck_s, max(found.stage_bytes)) == pytest.approx((slowest, max(peaks)))
    first, second = (0, 1) if balance == "time" else (1, 0)
    least = min(one[first] for one in possible)
    ties = min(one[second] for one in possible if one[first] <= least * (1 + 1e-9))
    assert ((slowest, max(peaks))[first], (slowest, max(peaks))[second]) == pytest.approx((least, ties))


def test_transfers_of_every_stage_count_on_both_sides():
    """Every cut of chains whose transfers take about as long as their passes, each link another: a stage takes as long
    as its passes, as what comes in before its first segment, or as what goes out behind its last."""
    draw = random.Random(0)
    for _ in range(400):
        count = draw.randint(2, 7)
        stages = draw.randint(2, min(count, 4))
        passes, outputs = ([draw.randint(1, 9) for _ in range(count)] for _ in range(2))
        speeds = [draw.choice([0.5, 1, 4]) for _ in range(stages - 1)]
        costs = [
            SegmentCost(str(at), Curve.per_sample(work), Curve.per_sample(0), output_bytes=Curve.per_sample(out))
            for at, (work, out) in enumerate(zip(passes, outputs, strict=True))
        ]

        def seconds(cut, passes=passes, outputs=outputs, speeds=speeds):
            ends = [0, *itertools.accumulate(cut)]
            moved = [0.0, *(outputs[end - 1] / speed for end, speed in zip(ends[1:-1], speeds, strict=True)), 0.0]
            return tuple(
                4.0 * max(sum(passes[begin:end]), moved[stage], moved[stage + 1])
                for stage, (begin, end) in enumerate(itertools.pairwise(ends))
            )

        links = [Link(0.0, speed) for speed in speeds]
        devices = [Device(str(at)) for at in range(stages)]
        found = partition(costs, devices, batch=4, micro_batches=2, links=links)
        assert found.stage_s == pytest.approx(seconds(found.sizes))
        assert found.bottleneck_s == pytest.approx(min(max(seconds(cut)) for cut in cuts(count, stages)))


@given(
    costs=problems["costs"],
    stages=st.integers(1, 3),
    limit=st.integers(20, 300),
    micro_batches=st.integers(1, 4),
    **modes,
)
def test_what_fits_nowhere_really_fails(costs, stages, limit, micro_batches, schedule, remat):
    """Each cut runs its allocations in order on devices of that capacity."""
    assume(stages <= len(costs))
    devices, sizes = [Device(str(at), memory_bytes=limit) for at in range(stages)], [2] * micro_batches
    capacity = [limit] * stages
    try:
        found = partition(
            costs, devices, batch=2 * micro_batches, micro_batches=micro_batches, schedule=schedule, remat=remat
        )
    except ConfigError:
        for cut in cuts(len(costs), stages):
            with pytest.raises(MemoryError):
                real_peaks(costs, cut, sizes, schedule, remat, capacity)
    else:
        assert real_peaks(costs, found.sizes, sizes, schedule, remat, capacity) == pytest.approx(found.stage_bytes)


# ---- what it says


def test_memory_that_is_too_small_is_told_per_device():
    devices = [Device("cuda:0", memory_bytes=2**30), Device("cuda:1", memory_bytes=3 * 2**30 - 1)]
    with pytest.raises(ConfigError) as refused:
        partition(CHAIN, devices, batch=4, micro_batches=2)
    said = str(refused.value)
    assert "[1, 3]" in said and "cuda:0: 1.00 GiB needed, 1.00 GiB there" in said and "cuda:1: 3.00 GiB needed" in said
    assert 'remat="all"' in said


@pytest.mark.parametrize(
    ("devices", "balance", "said"),
    [
        (5, "time", "5 devices, 4 segments: a, b, c, d"),
        (0, "time", "0 devices"),
        (2, "speed", "'speed'"),
        (2, [2, 1], r"\[2, 1\] of 4 segments on 2 device"),
        (2, [4, 0], r"\[4, 0\]"),
        (2, [1, 1, 2], "at least 1, that sum to 4"),
    ],
)
def test_refusals(devices, balance, said):
    with pytest.raises(ConfigError, match=said):
        partition(CHAIN, [Device(str(at)) for at in range(devices)], batch=4, micro_batches=2, balance=balance)


# ---- models as they were measured: milliseconds a sample of 128 x 128, forward and backward, on one core

RESNET50 = {
    "stem": (3.59, 1.81), "layer1.0": (3.75, 6.79), "layer1.1": (2.9, 5.63), "layer1.2": (2.76, 5.07),
    "layer2.0": (4.03, 8.57), "layer2.1": (2.04, 4.27), "layer2.2": (2.1, 4.22), "layer2.3": (2.01, 4.42),
    "layer3.0": (3.45, 7.79), "layer3.1": (1.91, 4.35), "layer3.2": (2.13, 4.94), "layer3.3": (2.02, 4.85),
    "layer3.4": (1.77, 4.51), "layer3.5": (1.83, 4.22), "layer4.0": (3.85, 10.48), "layer4.1": (2.18, 6.15),
    "layer4.2": (2.42, 7.68), "head": (0.13, 0.49),
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "stages", "by_hand_sizes", "least_gain"),
    [
        (RESNET50, 2, (8, 10), 1.02),  # the documents' cut: stem, layer1, layer2 | layer3, layer4, head
        (RESNET50, 3, (6, 6, 6), 1.01),
        (RESNET50, 4, (5, 5, 4, 4), 1.04),
    ],
)
def test_it_beats_as_many_blocks_each(model, stages, by_hand_sizes, least_gain):
    """In the time of the slowest stage, which is what a long pipeline takes. These are cuts between blocks only: a cut
    may also lie inside one."""
    costs = [SegmentCost(name, Curve.per_sample(a / 1e3), Curve.per_sample(b / 1e3)) for name, (a, b) in model.items()]
    devices = [Device(f"cpu {n}") for n in range(stages)]
    assert len(model) == sum(by_hand_sizes)
    blocks = partition(costs, devices, balance=by_hand_sizes, batch=32, micro_batches=8)
    best = partition(costs, devices, batch=32, micro_batches=8)
    assert blocks.bottleneck_s > least_gain * best.bottleneck_s, (blocks.bottleneck_s / best.bottleneck_s, best.sizes)
