"""How long a step of a split model will take, told from a few short ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hvdtrain.pipeline._cutting import batch_size, cut
from hvdtrain.pipeline._devices import CPU_POOL
from hvdtrain.pipeline._lanes import cpu_slots
from hvdtrain.pipeline._worker import StageError
from hvdtrain.pipeline.plan import Curve, Device, Link, Pool, StageCost, stage_costs
from hvdtrain.pipeline.plan_simulate import simulate
from hvdtrain.pipeline.runtime import Pipeline
from hvdtrain.pipeline.unsplit import seconds_of

TRIED_AT_ONCE = 3  # micro-batches of a step that is timed: enough for the stages to overlap

Loss = Callable[[Any, Any], Tensor]
Passes = dict[tuple[int, str], float]  # seconds of (stage, "forward" or "backward")


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, from what each stage takes.

    Attributes:
        stages: the cost of each.
        overhead_s: of a step, besides its stages.
        links: between the stages.
    """

    pipe: Pipeline
    stages: Sequence[StageCost]
    overhead_s: float
    links: Sequence[Link] | Link = Link()
    pools: Mapping[str, Pool] = field(default_factory=dict)
    remat_is_in: bool = False

    def __call__(self, sizes: Sequence[int]) -> float:
        """Seconds of a step.

        Args:
            sizes: samples of each micro-batch.
        """
        remat = "never" if self.remat_is_in else self.pipe.remat
        step = simulate(self.stages, sizes=sizes, schedule=self.pipe.schedule, remat=remat, links=self.links,
                        pools=self.pools)  # fmt: skip
        return step.step_s + self.overhead_s


def predict(pipe: Pipeline, x: Any, y: Any, loss: Loss) -> Prediction:
    """Times a few short steps, of 3 micro-batches of few samples each, and tells what other steps will take.

    On CPUs the stages' own passes are timed, while they work side by side. On GPUs, where a pass has only been asked
    for when its call returns, the costs are those of ``pipe.profile``; without one, whole steps are timed, and the
    stages taken to be alike.

    Args:
        pipe, x, y, loss: as in `Pipeline.step`.

    Raises:
        StageError: no step could be run.
    """
    on_cpu = all(device.type == "cpu" for device in pipe.devices)
    known = None if on_cpu else from_profile(pipe)
    if known is not None:
        return known
    with left_as_it_is(pipe):
        pipe.record = on_cpu
        timed = _ShortSteps(pipe, x, y, loss).all()
    stages = [
        StageCost(
            Device(str(device), pool=CPU_POOL if on_cpu else ""),
            _curve(timed, (stage, "forward")),
            _curve(timed, (stage, "backward")),
        )
        for stage, device in enumerate(pipe.devices)
    ]
    slots = cpu_slots(len(stages)) if on_cpu else 0
    # the passes were timed beside others: those of the pool do not slow each other down once more
    pools = {CPU_POOL: Pool((1.0,) * len(stages), slots)}
    return Prediction(pipe, stages, min(overhead_s for _, _, overhead_s in timed), pools=pools, remat_is_in=True)


def from_profile(pipe: Pipeline) -> Prediction | None:
    """What the profile says, that the model was cut by: each segment timed by itself; None if there is none."""
    its = pipe.profile
    if its is None or not any(cost.forward_s(1) for cost in its.costs):  # only bytes were measured
        return None
    counts = [len(stage.segments) for stage in pipe.stages]
    return Prediction(pipe, stage_costs(its.costs, counts, its.devices), 0.0, its.links, its.pools)


def _curve(timed: Sequence[tuple[int, Passes, float]], key: tuple[int, str]) -> Curve:
    return Curve(tuple((size, passes[key]) for size, passes, _ in timed))


@dataclass(frozen=True)
class _ShortSteps:
    """Steps of a part of the batch, for each of a few sizes of a micro-batch."""

    pipe: Pipeline
    x: Any
    y: Any
    loss: Loss

    def all(self) -> list[tuple[int, Passes, float]]:
        """(samples of a micro-batch, seconds of each stage's passes, the rest of the step); sizes that cannot be run
        (batch-norm over a single value, memory) are left out."""
        batch = batch_size(self.x if type(self.x) is tuple else (self.x,))
        most = max(1, batch // TRIED_AT_ONCE)
        timed, failure = [], None
        for size in sorted({1, max(1, round(math.sqrt(most))), most}):
            try:
                timed.append((size, *self._one(size, batch)))
            except StageError as error:
                failure = error
        if not timed:
            assert failure is not None
            raise failure
        return timed

    def _one(self, size: int, batch: int) -> tuple[Passes, float]:
        pipe = self.pipe
        pipe.micro_batches = min(TRIED_AT_ONCE, batch // size)
        taken = size * pipe.micro_batches
        x, y = (self.x, self.y) if taken == batch else cut((self.x, self.y), [taken, batch - taken])[0]
        pipe.step(x, y, self.loss)  # plans the layers' work for a new shape, and is the first to touch the memory
        passes: dict[tuple[int, str], list[float]] = {}
        overheads_s = []
        for _ in range(2):
            seconds = seconds_of(lambda: pipe.step(x, y, self.loss), pipe.devices)
            blocks = pipe.timeline
            found = [((stage, kind), end - start) for stage, kind, _, start, end in blocks] or list(
                _equal_seconds(len(pipe.stages), pipe.micro_batches, seconds).items()
            )
            for key, its in found:
                passes.setdefault(key, []).append(its)
            from_to = max(block[4] for block in blocks) - min(block[3] for block in blocks) if blocks else seconds
            overheads_s.append(seconds - from_to)
        for parameter in pipe.module.parameters():
            parameter.grad = None
        # the median over both: one that had to wait for something else on the machine does not count
        return {key: statistics.median(its) for key, its in passes.items()}, max(0.0, min(overheads_s))


def _equal_seconds(stages: int, micro_batches: int, seconds: float) -> Passes:
    """From a whole step: alike in every stage, and a backward pass twice a forward pass."""
    each = seconds / (micro_batches + stages - 1)  # both passes
    return {(k, kind): each * part for k in range(stages) for kind, part in (("forward", 1 / 3), ("backward", 2 / 3))}


@contextmanager
def left_as_it_is(pipe: Pipeline) -> Iterator[None]:
    """Gradients, buffers, random state and settings are afterwards what they were."""
    gpus = sorted({device.index or 0 for device in pipe.devices if device.type == "cuda"})
    settings = {name: getattr(pipe, name) for name in ("micro_batches", "overlap", "record")}
    gradients = [(parameter, parameter.grad) for parameter in pipe.module.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in pipe.module.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(gpus, device_type="cuda"):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for buffer, value in buffers:
            buffer.data.copy_(value)
        for name, setting in settings.items():
            setattr(pipe, name, setting)
