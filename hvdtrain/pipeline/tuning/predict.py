"""How long a step of a split model will take, told from a few short ones."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hvdtrain.pipeline.devices import CPU_POOL, cpu_slots
from hvdtrain.pipeline.microbatch import batch_size, cut, marked
from hvdtrain.pipeline.plan.schedule import (
    Curve,
    Device,
    Link,
    Pool,
    Remat,
    StageCost,
    actions,
    recomputed,
    stage_costs,
)
from hvdtrain.pipeline.plan.simulate import pool_speeds, simulate
from hvdtrain.pipeline.runtime import Pipeline
from hvdtrain.pipeline.trace.restore import preserved_state
from hvdtrain.pipeline.tuning.unsplit import seconds_of
from hvdtrain.pipeline.worker import StageError

MICRO_BATCHES = 3  # of a step that is timed, where the batch has so many: enough for the stages to overlap
ROUNDS, ROUNDS_S = 4, 1.0  # such steps of one size: at most, and for how long more are begun

Loss = Callable[[Any, Any], Tensor]
Passes = dict[tuple[int, str], float]  # seconds of (stage, "forward" or "backward"), alone; nothing recomputed


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, from what each stage takes.

    Attributes:
        stages: the cost of each.
        overhead_s: of a step, besides its stages.
        links: between the stages.
        pools: of the stages' devices.
    """

    pipe: Pipeline
    stages: Sequence[StageCost]
    overhead_s: float
    links: Sequence[Link] | Link = Link()
    pools: Mapping[str, Pool] = field(default_factory=dict)

    def __call__(self, sizes: Sequence[int]) -> float:
        """Seconds of a step.

        Args:
            sizes: samples of each micro-batch.
        """
        pipe = self.pipe
        step = simulate(
            self.stages, sizes=sizes, schedule=pipe.schedule, remat=pipe.remat, links=self.links, pools=self.pools
        )
        return step.step_s + self.overhead_s


def predict(pipe: Pipeline, x: Any, y: Any, loss: Loss) -> Prediction:
    """Times a few short steps, of 2 or 3 micro-batches, of at most half the batch each, and tells what others take.

    On CPUs the stages' own passes are timed: one at a time, and side by side, from which comes how much they slow each
    other down. On GPUs, where a pass has only been asked for when its call returns, the costs are those of
    `pipe.profile`; without one, whole steps are timed, and the stages taken to be alike.

    Args:
        pipe, x, y, loss: as in `Pipeline.step`.

    Raises:
        StageError: no step could be run.
    """
    on_cpu = all(device.type == "cpu" for device in pipe.devices)
    known = None if on_cpu else from_profile(pipe)
    if known is not None:
        return known
    with preserved(pipe):
        # 1F1B whatever the steps will be: in fill-drain a backward pass finds little of its forward pass in a cache,
        # and takes longer than it does in a step of one micro-batch
        pipe.record, pipe.schedule = on_cpu, "1f1b"
        timed = _ShortSteps(pipe, x, y, loss).all()
    stages = [
        StageCost(
            Device(str(device), pool=CPU_POOL if on_cpu else ""),
            _curve(timed, (stage, "forward")),
            _curve(timed, (stage, "backward")),
        )
        for stage, device in enumerate(pipe.devices)
    ]
    pools = {}
    if on_cpu:
        slots = cpu_slots(len(stages))
        by_step = [pool_speeds(seen, slots or len(stages)) for one in timed for seen in one.side_by_side]
        # again the median: a step that something else disturbed would make every prediction slow
        pools = {CPU_POOL: Pool(tuple(map(statistics.median, zip(*by_step, strict=True))), slots)}
    return Prediction(pipe, stages, min(one.overhead_s for one in timed), pools=pools)


def from_profile(pipe: Pipeline) -> Prediction | None:
    """What the profile says, that the model was cut by: each segment timed by itself; None if there is none."""
    its = pipe.profile
    if its is None or not any(cost.forward_s(1) for cost in its.costs):  # only bytes were measured
        return None
    counts = [len(stage.segments) for stage in pipe.stages]
    return Prediction(pipe, stage_costs(its.costs, counts, its.devices), 0.0, its.links, its.pools)


@dataclass(frozen=True)
class _Timed:
    """Short steps of one size of a micro-batch.

    Attributes:
        size: samples of a micro-batch.
        passes: of each stage.
        overhead_s: of a step, besides its passes.
        side_by_side: (start, end, seconds it takes alone) of each pass, for every step whose stages overlapped.
    """

    size: int
    passes: Passes
    overhead_s: float
    side_by_side: Sequence[Sequence[tuple[float, float, float]]] = ()


def _curve(timed: Sequence[_Timed], key: tuple[int, str]) -> Curve:
    return Curve(tuple((one.size, one.passes[key]) for one in timed))


@dataclass(frozen=True)
class _ShortSteps:
    """Steps of a part of the batch, for each of a few sizes of a micro-batch."""

    pipe: Pipeline
    x: Any
    y: Any
    loss: Loss

    def all(self) -> list[_Timed]:
        """Sizes that cannot be run (batch-norm over a single value, memory) are left out."""
        batch = batch_size(self.x if type(self.x) is tuple else (self.x,))
        most = max(1, batch // 2)
        timed, failure = [], None
        for size in sorted({1, max(1, round(math.sqrt(most))), most}):
            try:
                timed.append(self._one(size, batch))
            except StageError as error:
                failure = error
            finally:
                for parameter in self.pipe.module.parameters():
                    parameter.grad = None
        if not timed:
            assert failure is not None
            raise failure
        return timed

    def _one(self, size: int, batch: int) -> _Timed:
        count = min(MICRO_BATCHES, batch // size)
        # plans the layers' work for a new shape, is the first to touch memory, and leaves gradients: from now on every
        # backward pass adds to them, as all but the first of a step do, which for few samples is much of its time
        self._step(size, count, batch)
        if not self.pipe.record:
            seconds = statistics.median(self._step(size, count, batch)[0] for _ in range(2))
            return _Timed(size, equal_seconds(len(self.pipe.stages), count, seconds, self.pipe.remat), 0.0)
        begun = time.perf_counter()
        by_itself: list[_Block] = []
        side_by_side: list[list[_Block]] = []
        overheads_s = []
        for turn in range(ROUNDS):
            if turn and time.perf_counter() - begun > ROUNDS_S:
                break
            if len(self.pipe.stages) > 1:
                by_itself += self._step(size, count, batch, overlap=False)[1]
            seconds, blocks = self._step(size, count, batch)
            side_by_side.append(blocks)
            overheads_s.append(seconds - (max(b.end_s for b in blocks) - min(b.start_s for b in blocks)))
        passes = _passes(by_itself or [block for blocks in side_by_side for block in blocks])
        known = [[(block.start_s, block.end_s, block.alone_s(passes)) for block in blocks] for blocks in side_by_side]
        return _Timed(size, passes, max(0.0, min(overheads_s)), known)

    def _part(self, taken: int, rest: int) -> Any:
        arguments = marked(self.x if type(self.x) is tuple else (self.x,), self.pipe.chunk)
        return cut((arguments, self.y), (taken, rest))[0]

    def _step(self, size: int, count: int, batch: int, *, overlap: bool = True) -> tuple[float, list[_Block]]:
        """Seconds of one step, and its passes."""
        pipe, taken = self.pipe, size * count
        pipe.micro_batches, pipe.overlap = count, overlap
        x, y = (self.x, self.y) if taken == batch else self._part(taken, batch - taken)
        seconds = seconds_of(lambda: pipe.step(x, y, self.loss), pipe.devices)
        again = [
            recomputed(pipe.remat, actions(pipe.schedule, stage, len(pipe.stages), count))
            for stage in range(len(pipe.stages))
        ]
        return seconds, [
            _Block(stage, kind, start, end, kind == "backward" and micro in again[stage])
            for stage, kind, micro, start, end in pipe.timeline
        ]


@dataclass(frozen=True)
class _Block:
    """A pass as it was timed; `again`: a backward pass with the forward pass before it."""

    stage: int
    kind: str
    start_s: float
    end_s: float
    again: bool

    def alone_s(self, passes: Passes) -> float:
        """What it takes where nothing runs beside it."""
        return passes[self.stage, self.kind] + (passes[self.stage, "forward"] if self.again else 0.0)


def _passes(blocks: Sequence[_Block]) -> Passes:
    """Medians: a pass that had to wait for something else on the machine does not count."""
    passes: Passes = {}
    for kind in ("forward", "backward"):
        for stage in sorted({block.stage for block in blocks}):
            its = [
                block.end_s - block.start_s - (passes[stage, "forward"] if block.again else 0.0)
                for block in blocks
                if (block.stage, block.kind) == (stage, kind)
            ]
            passes[stage, kind] = max(0.0, statistics.median(its))
    return passes


def equal_seconds(stages: int, micro_batches: int, seconds: float, remat: Remat = "never") -> Passes:
    """From a whole step: alike in every stage, a backward pass twice a forward pass."""
    both = seconds / (micro_batches + stages - 1)  # and, where it is recomputed, the forward pass once more
    forward = both / (3 if remat == "never" else 4)
    return {(k, kind): forward * work for k in range(stages) for kind, work in (("forward", 1), ("backward", 2))}


@contextmanager
def preserved(pipe: Pipeline) -> Iterator[None]:
    """Gradients, buffers, random state and settings are afterwards what they were; inside, no loss is proven."""
    settings = {name: getattr(pipe, name) for name in ("micro_batches", "schedule", "overlap", "record", "proofs")}
    pipe.proofs = False  # they take time; the first steps of training have them
    try:
        with preserved_state(pipe.module, *pipe.devices):
            yield
    finally:
        for name, setting in settings.items():
            setattr(pipe, name, setting)
