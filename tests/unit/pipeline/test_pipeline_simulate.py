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

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.plan.costs import Link, StageCost
from hvdtrain.pipeline.plan.schedule import SCHEDULES, actions, micro_batch_sizes, recomputed
from hvdtrain.pipeline.plan.simulate import simulate

# ---- by hand


def test_equal_stages_have_the_bubble_of_the_table():
    for schedule, stages, micro_batches in itertools.product(SCHEDULES, range(1, 5), (1, 2, 5, 8)):
        found = simulate([stage(1, 1)] * stages, sizes=[1] * micro_batches, schedule=schedule)
        assert found.step_s == pytest.approx(2 * (micro_batches + stages - 1))
        assert found.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
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
    with pytest.raises(ConfigError, match="every two neighbouring stages need a link"):
        simulate([stage(1, 1)] * 2, sizes=[1], links=[Link()] * 2)


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
