"""Schedules as data, what stages hold and cost; the stub allocator says whether what is promised about memory is so."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.plan.costs import Curve, Device, Link, Pool, SegmentCost, stage_costs
from hvdtrain.pipeline.plan.schedule import (
    REMATS,
    Action,
    Remat,
    Schedule,
    actions,
    footprints,
    micro_batch_sizes,
    recomputed,
)

# the others: test_pipeline_schedules.py
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")
Ticks = Sequence[Sequence[Action | None]]
SHAPES = list(itertools.product(SCHEDULES, range(1, 7), range(1, 13)))

# ---- schedules


def table(schedule: Schedule, stages: int, micro_batches: int) -> list[list[Action | None]]:
    """The schedule as ticks x stages, where every pass takes one tick and transfers take none; None: idle.

    A stage takes its next action as soon as what it needs was ready before the tick.
    """
    orders = [actions(schedule, stage, stages, micro_batches) for stage in range(stages)]
    position = [0] * stages
    done: set[tuple[int, Action]] = set()
    ticks: list[list[Action | None]] = []
    while any(at < len(order) for at, order in zip(position, orders, strict=True)):
        tick = [
            order[at] if at < len(order) and is_ready(stage, order[at], stages, done) else None
            for stage, (at, order) in enumerate(zip(position, orders, strict=True))
        ]
        assert any(tick), f"{schedule} waits for itself: {stages} stages, {micro_batches} micro-batches"
        for stage, action in enumerate(tick):
            if action is not None:
                done.add((stage, action))
                position[stage] += 1
        ticks.append(tick)
    return ticks


def is_ready(stage: int, action: Action, stages: int, done: set[tuple[int, Action]]) -> bool:
    """A forward needs the stage before; a backward its own forward and the stage after."""
    if action.kind == "forward":
        return stage == 0 or (stage - 1, action) in done
    own = (stage, Action("forward", action.micro)) in done
    return own and (stage == stages - 1 or (stage + 1, action) in done)


def bubble(schedule: Schedule, stages: int, micro_batches: int) -> float:
    """The share of its time that a stage is idle, all stages alike: (stages - 1) / (micro_batches + stages - 1)
    (arXiv 1811.06965, section 2.3); counted in `table`."""
    ticks = table(schedule, stages, micro_batches)
    return sum(action is None for tick in ticks for action in tick) / (len(ticks) * stages)


def broken_rules(ticks: Ticks, stages: int, micro_batches: int) -> list[str]:
    """What a table does wrong: every pass once, after all that it needs."""
    when: dict[tuple[int, str, int], int] = {}
    wrong = []
    for tick, row in enumerate(ticks):
        for stage, action in enumerate(row):
            if action is not None and when.setdefault((stage, action.kind, action.micro), tick) != tick:
                wrong.append(f"stage {stage} does {action} twice")
    for stage, kind, micro in itertools.product(range(stages), ("forward", "backward"), range(micro_batches)):
        needs = [(stage - 1, kind, micro)] if kind == "forward" else [(stage + 1, kind, micro)]
        needs += [(stage, "forward", micro)] if kind == "backward" else []
        at = when.get((stage, kind, micro))
        if at is None:
            wrong.append(f"stage {stage} leaves out the {kind} of {micro}")
            continue
        for need in needs:
            if 0 <= need[0] < stages and when.get(need, at) >= at:
                wrong.append(f"stage {stage}: {kind} of {micro} before {need}")
    return wrong


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_table_is_a_schedule(schedule):
    for _, stages, micro_batches in (shape for shape in SHAPES if shape[0] == schedule):
        assert broken_rules(table(schedule, stages, micro_batches), stages, micro_batches) == []


def test_broken_tables_are_seen():
    """Negative twin: what `broken_rules` would not find proves nothing."""
    good = table("1f1b", 3, 4)
    assert broken_rules(good[1:], 3, 4) and broken_rules(good[:-1], 3, 4) and broken_rules([*good, good[0]], 3, 4)
    assert broken_rules([list(reversed(row)) for row in good], 3, 4)  # the last stage first
    assert broken_rules(good[::-1], 3, 4)


def test_bubble_is_that_of_the_paper():
    """arXiv 1811.06965, section 2.3; arXiv 2006.09503 says the same of 1F1B with a flush."""
    for schedule, stages, micro_batches in SHAPES:
        expected = (stages - 1) / (micro_batches + stages - 1)
        assert bubble(schedule, stages, micro_batches) == pytest.approx(expected), (schedule, stages, micro_batches)


def test_gpipe_by_hand():
    f, b = (lambda i: Action("forward", i)), (lambda i: Action("backward", i))
    assert table("gpipe", 2, 2) == [
        [f(0), None], [f(1), f(0)], [None, f(1)], [None, b(1)], [b(1), b(0)], [b(0), None],
    ]  # fmt: skip
    assert table("1f1b", 2, 2) == [[f(0), None], [f(1), f(0)], [None, b(0)], [b(0), f(1)], [None, b(1)], [b(1), None]]


def in_flight(order: Sequence[Action], remat: Remat = "never") -> int:
    """The most micro-batches whose activations the stage holds at a time."""
    ones = [1] * (max((action.micro for action in order), default=0) + 1)
    return max((sum(count for _, count in moment.activations) for moment in footprints(order, ones, remat)), default=0)


def test_in_flight():
    for schedule, stages, micro_batches in SHAPES:
        for stage in range(stages):
            order = actions(schedule, stage, stages, micro_batches)
            expected = micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)
            assert in_flight(order) == expected
            assert in_flight(order, "all") == 1
            assert in_flight(order, "except_last") <= 2  # one kept, one recomputed
    assert in_flight(()) == 0


def test_recomputed():
    gpipe, last = actions("gpipe", 0, 2, 4), actions("1f1b", 1, 2, 4)
    assert recomputed("never", gpipe) == set() and recomputed("all", gpipe) == {0, 1, 2, 3}
    assert recomputed("except_last", gpipe) == {0, 1, 2}
    assert recomputed("except_last", last) == set()  # every backward follows on its forward
    assert recomputed("all", last) == {0, 1, 2, 3}


@given(batch=st.integers(1, 200), micro_batches=st.integers(1, 50))
def test_micro_batch_sizes(batch, micro_batches):
    if batch < micro_batches:
        with pytest.raises(ConfigError, match="every micro-batch needs a sample"):
            micro_batch_sizes(batch, micro_batches)
        return
    sizes = micro_batch_sizes(batch, micro_batches)
    assert sum(sizes) == batch and len(sizes) == micro_batches
    assert list(sizes) == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (lambda: actions("1F1B", 0, 2, 4), "'1F1B'"),  # type: ignore[arg-type]  # as a user writes it
        (lambda: recomputed("some", ()), "never, all, except_last"),  # type: ignore[arg-type]  # as a user writes it
        (lambda: micro_batch_sizes(4, 0), "at least 1 micro-batch"),
        (lambda: Curve(()), "a curve has points"),
        (lambda: Curve(((2, 1.0), (2, 3.0))), "different numbers of samples"),
    ],
)
def test_refusals(refused, said):
    with pytest.raises(ConfigError, match=said):
        refused()


# ---- curves, links, pools


def test_curve():
    curve = Curve(((4, 5.0), (1, 2.0)))
    assert [curve(at) for at in (1, 2, 4, 8)] == [2, 3, 5, 9]
    assert curve(0) == 1  # what a call takes, without samples
    assert Curve.constant(3)(0) == Curve.constant(3)(7) == 3
    assert Curve(((4, 8.0),))(1) == 2  # one point: proportional
    assert (curve + Curve.constant(1))(2) == 4 and (2 * curve)(2) == 6 == (curve * 2)(2)
    assert (curve + Curve.per_sample(1))(8) == 17


def test_curve_of_noise_stays_sensible():
    """Fewer samples never cost more, nor less than their share."""
    falling, steep = Curve(((1, 2.0), (4, 1.0))), Curve(((4, 1.0), (8, 4.0)))
    assert falling(0.5) == 2 and falling(9) == 1
    assert steep(2) == 0.5 and steep(0) == 0


costs_of_a_curve = st.lists(
    st.tuples(st.integers(1, 64), st.floats(0, 10)), min_size=1, max_size=4, unique_by=lambda p: p[0]
)


@given(points=costs_of_a_curve, more=costs_of_a_curve)
def test_curves_add_where_they_were_measured(points, more):
    a, b = Curve(tuple(points)), Curve(tuple(more))
    for at, value in points:
        assert a(at) == pytest.approx(value)
        assert (a + b)(at) == pytest.approx(value + b(at))
    assert all(a(at) >= 0 for at in range(100))


def test_links_and_pools():
    assert Link(0.5, 100).seconds(50) == 1 and Link().seconds(1e12) == 0
    two_cores = Pool((1.0, 0.9))
    assert [two_cores.speed(n) for n in (1, 2, 3)] == [1, 0.9, pytest.approx(0.6)]
    assert Pool().speed(4) == 0.25  # one core


# ---- memory: an allocator with a device's capacity, and a stage that really allocates


class StubAllocator:
    """Hands out bytes, and has no more than `capacity`."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.used = self.peak = 0.0

    def take(self, size: float) -> float:
        self.used += size
        self.peak = max(self.peak, self.used)
        if self.used > self.capacity:
            raise MemoryError(f"{self.used} of {self.capacity}")
        return size

    def give(self, size: float) -> None:
        self.used -= size


class StubStage:
    """Runs a stage's actions, segment by segment, on an allocator.

    Kept activations contain the stage's input; of a micro-batch that is recomputed the input is all that stays. The
    backward pass of a segment needs the gradients of its output and input, and lets its activations go.
    """

    def __init__(self, costs: Sequence[SegmentCost], received: Curve, sizes: Sequence[int], memory: StubAllocator):
        self.costs, self.sizes, self.memory = costs, sizes, memory
        self.tensors = [received, *(cost.output_bytes for cost in costs)]
        for cost in costs:
            memory.take(cost.parameter_bytes + cost.gradient_bytes + cost.optimizer_bytes + cost.buffer_bytes)

    def run(self, order: Sequence[Action], again: frozenset[int]) -> None:
        for action in order:
            size = self.sizes[action.micro]
            if action.kind == "forward" and action.micro in again:
                self.memory.take(self.tensors[0](size))
            elif action.kind == "forward":
                self.forward(size)
            else:
                if action.micro in again:
                    self.forward(size)
                self.backward(size)
                self.memory.give(self.tensors[0](size) if action.micro in again else 0)

    def forward(self, size: int) -> None:
        for cost in self.costs:
            self.memory.take(cost.activation_bytes(size))

    def backward(self, size: int) -> None:
        gradient = self.memory.take(self.tensors[-1](size))
        for cost, tensor in zip(reversed(self.costs), reversed(self.tensors[:-1]), strict=True):
            below = self.memory.take(tensor(size))
            self.memory.give(gradient)
            self.memory.give(cost.activation_bytes(size))
            gradient = below
        self.memory.give(gradient)


def real_peaks(
    costs: Sequence[SegmentCost], cut: Sequence[int], sizes: Sequence[int], schedule, remat, capacity: Sequence[float]
) -> list[float]:
    """What the stages of a cut took from their allocators; MemoryError where one was too small."""
    peaks, begin = [], 0
    for stage, count in enumerate(cut):
        memory = StubAllocator(capacity[stage])
        received = costs[begin - 1].output_bytes if begin else Curve.constant(0)
        order = actions(schedule, stage, len(cut), len(sizes))
        StubStage(costs[begin : begin + count], received, sizes, memory).run(order, recomputed(remat, order))
        peaks.append(memory.peak)
        begin += count
    return peaks


whole = st.integers(0, 1000)
segments = st.builds(
    SegmentCost, st.sampled_from("abc"), st.just(Curve.constant(0)), st.just(Curve.constant(0)),
    whole, whole, whole, whole, whole.map(Curve.per_sample), whole.map(Curve.per_sample),
)  # fmt: skip
chains = st.lists(segments, min_size=3, max_size=7)
modes = {"schedule": st.sampled_from(SCHEDULES), "remat": st.sampled_from(REMATS)}


@given(costs=chains, stages=st.integers(1, 3), micro_batches=st.integers(1, 6), size=st.integers(1, 5), **modes)
def test_promised_memory_is_what_a_stage_takes(costs, stages, micro_batches, size, schedule, remat):
    """It fits exactly, and one byte less is an error."""
    cut, sizes = [1] * (stages - 1) + [len(costs) - stages + 1], [size] * micro_batches
    found = stage_costs(costs, cut, [Device(str(stage)) for stage in range(stages)])
    promised = [
        one.peak_bytes(actions(schedule, stage, stages, micro_batches), sizes, remat) for stage, one in enumerate(found)
    ]
    assert real_peaks(costs, cut, sizes, schedule, remat, promised) == pytest.approx(promised)
    for stage, most in enumerate(promised):
        if most:
            less = [size - 1 if at == stage else size for at, size in enumerate(promised)]
            with pytest.raises(MemoryError):
                real_peaks(costs, cut, sizes, schedule, remat, less)


@given(costs=chains, stages=st.integers(1, 3), batch=st.integers(6, 20), micro_batches=st.integers(1, 6), **modes)
def test_promised_memory_is_enough_for_uneven_micro_batches(costs, stages, batch, micro_batches, schedule, remat):
    """It may be more by what one sample's gradients take."""
    cut, sizes = [1] * (stages - 1) + [len(costs) - stages + 1], micro_batch_sizes(batch, micro_batches)
    found = stage_costs(costs, cut, [Device(str(stage)) for stage in range(stages)])
    promised = [
        one.peak_bytes(actions(schedule, stage, stages, micro_batches), sizes, remat) for stage, one in enumerate(found)
    ]
    taken = real_peaks(costs, cut, sizes, schedule, remat, promised)
    for one, most, peak in zip(found, promised, taken, strict=True):
        assert most - one.working_bytes(1) - 1e-6 <= peak <= most


def test_an_allocator_that_keeps_everything_is_seen():
    """Negative twin: a schedule that lets nothing go, as gpipe run with the orders of 1f1b promised, does not fit."""
    costs = [
        SegmentCost(name, Curve.constant(0), Curve.constant(0), 10, 10, 0, 0, Curve.per_sample(5)) for name in "ab"
    ]
    devices = [Device("0"), Device("1")]
    promised = [
        one.peak_bytes(actions("1f1b", stage, 2, 8), [4] * 8)
        for stage, one in enumerate(stage_costs(costs, [1, 1], devices))
    ]
    real_peaks(costs, [1, 1], [4] * 8, "1f1b", "never", promised)
    with pytest.raises(MemoryError):
        real_peaks(costs, [1, 1], [4] * 8, "gpipe", "never", promised)


@given(batch=st.integers(8, 30), micro_batches=st.integers(1, 8), weights=st.tuples(whole, whole), **modes)
def test_what_is_held_is_the_largest_of_all_moments(batch, micro_batches, weights, schedule, remat):
    """Whatever activations and inputs weigh."""
    sizes, (kept, received) = micro_batch_sizes(batch, micro_batches), weights
    for stage in range(3):
        order = actions(schedule, stage, 3, micro_batches)
        again, now, most = recomputed(remat, order), 0, 0
        for action in order:
            size, back = sizes[action.micro], action.kind == "backward"
            if action.micro in again:
                most = max(most, now + size * (kept if back else received))
                now += size * received * (-1 if back else 1)
            else:
                now += 0 if back else size * kept
                most = max(most, now)
                now -= size * kept if back else 0
        assert now == 0
        found = max(
            sum(size * count * kept for size, count in moment.activations)
            + sum(size * count * received for size, count in moment.inputs)
            for moment in footprints(order, sizes, remat)
        )
        assert found == most
