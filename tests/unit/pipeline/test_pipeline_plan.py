"""Schedules as data, what stages hold and cost; the stub allocator says whether what is promised about memory is so."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.plan.costs import Curve, Device, SegmentCost
from hvdtrain.pipeline.plan.partition import partition
from hvdtrain.pipeline.plan.schedule import (
    REMATS,
    SCHEDULES,
    Action,
    Remat,
    actions,
    footprints,
    micro_batch_sizes,
    recomputed,
)

# ---- schedules: bubbles are in test_pipeline_simulate.py


def test_gpipe_and_1f1b_by_hand():
    named = [" ".join(f"{a.kind[0]}{a.micro}" for a in actions(one, 0, 2, 3)) for one in SCHEDULES]
    assert named == ["f0 f1 f2 b2 b1 b0", "f0 f1 b0 f2 b1 b2"]


def test_recomputed():
    gpipe, last = actions("gpipe", 0, 2, 4), actions("1f1b", 1, 2, 4)
    assert recomputed("never", gpipe) == set() and recomputed("all", gpipe) == {0, 1, 2, 3}
    assert recomputed("except_last", gpipe) == {0, 1, 2}
    assert recomputed("except_last", last) == set()  # every backward follows on its forward


def in_flight(order: Sequence[Action], remat: Remat = "never") -> int:
    """The most micro-batches whose activations the stage holds at a time."""
    ones = [1] * (max((action.micro for action in order), default=0) + 1)
    return max((sum(count for _, count in moment.activations) for moment in footprints(order, ones, remat)), default=0)


def test_in_flight():
    for schedule, stages, micro_batches in itertools.product(SCHEDULES, range(1, 7), range(1, 13)):
        for stage in range(stages):
            order = actions(schedule, stage, stages, micro_batches)
            expected = micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)
            assert in_flight(order) == expected
            assert in_flight(order, "all") == 1
            assert in_flight(order, "except_last") <= 2  # one kept, one recomputed
    assert in_flight(()) == 0


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
        (lambda: Curve(()), "a curve needs points"),
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
            memory.take(cost.fixed_bytes)

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


def promised_bytes(costs, cut: Sequence[int], batch: int, micro_batches: int, schedule, remat, ahead: int = 0):
    """The peak of each stage of a cut, as a partition has it."""
    devices = [Device(str(stage), ahead=ahead) for stage in range(len(cut))]
    run = {"batch": batch, "micro_batches": micro_batches, "schedule": schedule, "remat": remat}
    return partition(costs, devices, balance=cut, **run).stage_bytes


CHAIN = [SegmentCost(name, Curve.per_sample(1), Curve.per_sample(2), fixed_bytes=2**30) for name in "abcd"]
whole = st.integers(0, 1000)
segments = st.builds(
    SegmentCost, st.sampled_from("abc"), st.just(Curve.constant(0)), st.just(Curve.constant(0)),
    whole, whole, whole.map(Curve.per_sample), whole.map(Curve.per_sample),
)  # fmt: skip
chains = st.lists(segments, min_size=3, max_size=7)
modes = {"schedule": st.sampled_from(SCHEDULES), "remat": st.sampled_from(REMATS)}


@given(costs=chains, stages=st.integers(1, 3), micro_batches=st.integers(1, 6), size=st.integers(1, 5), **modes)
def test_promised_memory_is_what_a_stage_takes(costs, stages, micro_batches, size, schedule, remat):
    """It fits exactly, and one byte less is an error."""
    cut, sizes = [1] * (stages - 1) + [len(costs) - stages + 1], [size] * micro_batches
    promised = promised_bytes(costs, cut, size * micro_batches, micro_batches, schedule, remat)
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
    promised = promised_bytes(costs, cut, batch, micro_batches, schedule, remat)
    taken = real_peaks(costs, cut, sizes, schedule, remat, promised)
    begin = 0
    for count, most, peak in zip(cut, promised, taken, strict=True):
        crossing = [cost.output_bytes(1) for cost in costs[max(0, begin - 1) : begin + count]]
        begin += count
        assert most - 2 * max(crossing) - 1e-6 <= peak <= most


def test_what_is_received_ahead_is_held():
    """Of the tensors that come in, or of the gradients that come back, the larger."""
    costs = [replace(CHAIN[0], output_bytes=Curve.per_sample(each)) for each in (3, 5, 4, 7)]
    cut, run = [2, 2], (8, 2, "1f1b", "never")
    plain, ahead = promised_bytes(costs, cut, *run), promised_bytes(costs, cut, *run, ahead=2)
    assert [a - b for a, b in zip(ahead, plain, strict=True)] == [2 * 4 * 5, 2 * 4 * 7]


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
