"""The simulator against longest paths, against real threads that wait on a clock, and by hand."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_pipelines import stage
from test_pipeline_plan import modes

from hvdtrain.pipeline.plan.costs import Link, Pool, StageCost
from hvdtrain.pipeline.plan.schedule import Schedule, actions, micro_batch_sizes, recomputed
from hvdtrain.pipeline.plan.simulate import pool_speeds, simulate

# the others: test_pipeline_schedules.py
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")

# ---- by hand


def test_equal_stages_have_the_bubble_of_the_table():
    for schedule, stages, micro_batches in itertools.product(SCHEDULES, range(1, 5), (1, 2, 5, 8)):
        found = simulate([stage(1, 1)] * stages, sizes=[1] * micro_batches, schedule=schedule)
        assert found.step_s == pytest.approx(2 * (micro_batches + stages - 1))
        assert found.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
        assert found.efficiency == pytest.approx(micro_batches / (micro_batches + stages - 1))
        assert len(found.timeline) == 2 * stages * micro_batches


def test_a_timeline_by_hand():
    found = simulate([stage(1, 2, 3), stage(2, 4)], sizes=[1], links=Link(0.5, 2.0), remat="all")
    assert [tuple(span) for span in found.timeline] == [
        (0, "forward", 0, 0, 1),
        (1, "forward", 0, 3, 5),  # the transfer takes 0.5 + 3 / 2
        (1, "backward", 0, 5, 11),  # its forward once more
        (0, "backward", 0, 13, 16),
    ]
    assert found.step_s == 16 and found.busy_s == (4, 8)


def test_a_split_without_overlap_is_the_sum():
    stages, sizes = [stage(1, 2, 3), stage(2, 4, 1), stage(1, 1)], [3, 2, 2]
    found = simulate(stages, sizes=sizes, links=Link(0.5, 2.0), overlap=False)
    transfers = sum(2 * (Link(0.5, 2.0).seconds(3 * size) + Link(0.5, 2.0).seconds(size)) for size in sizes)
    assert found.step_s == pytest.approx(7 * 11 + transfers)
    for before, after in itertools.pairwise(found.timeline):
        assert after.start_s >= before.end_s
    assert simulate(stages, sizes=sizes, links=Link(0.5, 2.0)).step_s < 0.8 * found.step_s


def test_stages_on_one_core_take_turns():
    """Two passes at half speed: nothing is gained by the pipeline, whatever the schedule."""
    for schedule in SCHEDULES:
        shared = [stage(1, 2, pool="cpu"), stage(1, 2, pool="cpu")]
        found = simulate(shared, sizes=[2] * 4, schedule=schedule, pools={"cpu": Pool((1.0, 0.5))})
        assert found.step_s == pytest.approx(48)
        assert simulate(shared, sizes=[2] * 4, schedule=schedule).step_s == pytest.approx(30)


def test_three_stages_take_turns_on_two_slots():
    """First come, first served; at the same moment one that has just ended a pass is first."""
    three, pools = [stage(1, 2, pool="cpu")] * 3, {"cpu": Pool((1.0, 1.0), slots=2)}
    found = simulate(three, sizes=[1] * 3, schedule="gpipe", pools=pools)
    starts = [[span.start_s for span in found.timeline if span.stage == at] for at in range(3)]
    assert starts == [[0, 1, 2, 12, 14, 16], [1, 2, 3, 8, 10, 12], [3, 4, 5, 6, 8, 10]]
    assert found.busy_s == (9, 9, 9), "a pass that waits is not busy"
    assert simulate(three, sizes=[1] * 3, schedule="gpipe").step_s == 15 < found.step_s == 18
    together = simulate(three, sizes=[1] * 3, pools=pools, overlap=False)
    assert together.step_s == 27, "one at a time, slots or not"


# ---- longest paths: no clock, no events


def longest_path(stages: Sequence[StageCost], sizes, schedule, remat, links: Sequence[Link]) -> float:
    """When the last pass ends, each being as late as the latest of what it waits for; first in, first out on links."""
    orders = [list(actions(schedule, k, len(stages), len(sizes))) for k in range(len(stages))]
    ends: dict[tuple, float] = {}
    free: dict[tuple[int, int], float] = defaultdict(float)  # a link's direction
    clock = [0.0] * len(stages)
    arrived = {(0, "forward", micro): 0.0 for micro in range(len(sizes))}
    while any(orders):
        for k, one in enumerate(stages):
            while orders[k] and (k, orders[k][0].kind, orders[k][0].micro) in arrived:
                action = orders[k].pop(0)
                size, key = sizes[action.micro], (k, action.kind, action.micro)
                seconds = one.forward_s(size) if action.kind == "forward" else one.backward_s(size)
                if action.kind == "backward" and action.micro in recomputed(
                    remat, actions(schedule, k, len(stages), len(sizes))
                ):
                    seconds += one.forward_s(size)
                ends[key] = clock[k] = max(clock[k], arrived[key]) + seconds
                to = k + (1 if action.kind == "forward" else -1)
                if to == len(stages):
                    arrived[k, "backward", action.micro] = ends[key]
                elif to >= 0:
                    at = min(k, to)
                    leaves = max(free[k, to], ends[key])
                    free[k, to] = leaves + links[at].seconds(stages[at].output_bytes(size))
                    arrived[to, action.kind, action.micro] = free[k, to]
    return max(ends.values())


tenths = st.integers(0, 40).map(lambda n: n / 10)
stages_of_a_kind = st.builds(stage, tenths, tenths, tenths)


@given(
    stages=st.lists(stages_of_a_kind, min_size=1, max_size=4),
    batch=st.integers(8, 25),
    micro_batches=st.integers(1, 8),
    link=st.builds(Link, tenths, st.sampled_from([0.7, 3.0, float("inf")])),
    **modes,
)
def test_it_equals_longest_paths(stages, batch, micro_batches, link, schedule, remat):
    sizes = micro_batch_sizes(batch, micro_batches)
    found = simulate(stages, sizes=sizes, schedule=schedule, remat=remat, links=link)
    expected = longest_path(stages, sizes, schedule, remat, [link] * (len(stages) - 1))
    assert found.step_s == pytest.approx(expected)


# ---- what passes slow each other down by, from a timeline


@given(
    passes=st.lists(st.tuples(st.floats(0.5, 2), st.floats(0.5, 3)), min_size=2, max_size=4),
    c=st.floats(0, 1.5),
    micro_batches=st.integers(2, 6),
    slots=st.integers(0, 3),
    **modes,
)
def test_the_pool_is_found_again(passes, c, micro_batches, slots, schedule, remat):
    stages = [stage(forward, backward, pool="cpu") for forward, backward in passes]
    speeds = tuple(1 / (1 + c * others) for others in range(len(stages)))
    sizes = [1] * micro_batches
    step = simulate(stages, sizes=sizes, schedule=schedule, remat=remat, pools={"cpu": Pool(speeds, slots)})
    again = [recomputed(remat, actions(schedule, k, len(stages), micro_batches)) for k in range(len(stages))]
    seen = []
    for at, kind, micro, start, end in step.timeline:
        forward, backward = passes[at]
        seen.append((start, end, forward if kind == "forward" else backward + forward * (micro in again[at])))
    assert pool_speeds(seen, len(stages)) == pytest.approx(speeds if slots != 1 else (1.0,) * len(stages))
