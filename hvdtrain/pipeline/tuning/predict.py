"""Predicts the time of a step of a split model from a few short steps."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from hvdtrain.pipeline.plan.costs import Curve, Device, Link, Pool, StageCost, stage_costs
from hvdtrain.pipeline.plan.schedule import Remat, recomputed, stage_orders
from hvdtrain.pipeline.plan.simulate import Span, pool_speeds, simulate
from hvdtrain.pipeline.run.runtime import Pipeline
from hvdtrain.pipeline.run.worker import StageError
from hvdtrain.pipeline.trace.restore import preserved_state
from hvdtrain.pipeline.trace.tracer import parted
from hvdtrain.pipeline.tuning.unsplit import seconds_of
from hvdtrain.pipeline.values.microbatch import flat, marked, pieces_of, samples_of
from hvdtrain.pipeline.values.places import CPU_POOL, cpu_slots

MICRO_BATCHES = 3  # of a step that is timed, where the batch has so many: enough for the stages to overlap
ROUNDS, ROUNDS_S = 4, 1.0  # such steps of one size: at most, and for how long more are begun

Loss = Callable[[Any, Any], Tensor]
Passes = dict[tuple[int, str], float]  # seconds of (stage, "forward" or "backward"), alone; nothing recomputed


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, from what each stage takes."""

    pipe: Pipeline
    stages: Sequence[StageCost]  # the cost of each
    overhead_s: float  # of a step, besides its stages
    links: Sequence[Link] | Link = Link()  # between the stages
    pools: Mapping[str, Pool] = field(default_factory=dict)  # of the stages' devices

    def __call__(self, sizes: Sequence[int]) -> float:
        """Returns the seconds of a step of micro-batches of so many samples."""
        pipe = self.pipe
        step = simulate(
            self.stages, sizes=sizes, schedule=pipe.schedule, remat=pipe.remat, links=self.links, pools=self.pools,
            chunks=pipe.stages_per_device,
        )  # fmt: skip
        return step.step_s + self.overhead_s


def predict(pipe: Pipeline, x: Any, y: Any, loss: Loss, kwargs: Mapping[str, Any] | None = None) -> Prediction:
    """Times a few short steps, of 2 or 3 micro-batches, of at most half the batch each, and predicts what others take.

    On CPUs the stages' own passes are timed: one at a time, and side by side, which shows how much they slow each
    other down. On GPUs, where a call returns before its pass has run, the costs are those of `pipe.profile`. Without
    a profile, whole steps are timed, and the stages are assumed to be alike. Raises `StageError` if no step
    could be run; arguments as in `Pipeline.step`.
    """
    on_cpu = all(device.type == "cpu" for device in pipe.devices)
    known = None if on_cpu else from_profile(pipe)
    if known is not None:
        return known
    with preserved(pipe):
        # 1F1B whatever the steps will be: in fill-drain a backward pass finds little of its forward pass in a cache,
        # and takes longer than it does in a step of one micro-batch
        pipe.record, pipe.schedule = on_cpu, "1f1b" if pipe.stages_per_device == 1 else pipe.schedule
        timed = _short_steps(pipe, flat(x, kwargs, pipe.names), y, loss)
    stages = [
        StageCost(
            Device(str(stage.device), pool=CPU_POOL if on_cpu else ""),
            _curve(timed, (stage.index, "forward")),
            _curve(timed, (stage.index, "backward")),
        )
        for stage in pipe.stages
    ]
    pools = {}
    if on_cpu:
        slots = cpu_slots(len(pipe.devices))
        by_step = [pool_speeds(seen, slots or len(pipe.devices)) for one in timed for seen in one.side_by_side]
        # again the median: a step that something else disturbed would make every prediction slow
        pools = {CPU_POOL: Pool(tuple(map(statistics.median, zip(*by_step, strict=True))), slots)}
    return Prediction(pipe, stages, min(one.overhead_s for one in timed), pools=pools)


def from_profile(pipe: Pipeline) -> Prediction | None:
    """Returns the prediction from the profile behind the cut, each segment timed alone; None if there is none."""
    its = pipe.profile
    if its is None or not any(cost.forward_s(1) for cost in its.costs):  # only bytes were measured
        return None
    counts = [len(stage.segments) for stage in pipe.stages]
    devices = [*its.devices] * pipe.stages_per_device
    return Prediction(pipe, stage_costs(its.costs, counts, devices), 0.0, its.links, its.pools)


@dataclass(frozen=True)
class _Timed:
    """Short steps of one size of a micro-batch."""

    size: int  # samples of a micro-batch
    passes: Passes  # of each stage
    overhead_s: float  # of a step, besides its passes
    side_by_side: Sequence[Sequence[tuple[float, float, float]]] = ()  # (start, end, seconds alone), by step


def _curve(timed: Sequence[_Timed], key: tuple[int, str]) -> Curve:
    return Curve(tuple((one.size, one.passes[key]) for one in timed))


def _short_steps(pipe: Pipeline, arguments: tuple[Any, ...], y: Any, loss: Loss) -> list[_Timed]:
    """Times steps of a part of the batch, for a few sizes of a micro-batch; skips those that cannot be run."""
    batch = samples_of(arguments)
    most = max(1, batch // 2)
    timed, failure = [], None
    for size in sorted({1, max(1, round(math.sqrt(most))), most}):
        count = pipe.micro_batches = min(MICRO_BATCHES, batch // size)
        given = arguments, y
        if size * count < batch:
            pieces = pieces_of((marked(arguments, pipe.chunk, pipe.names), y), (size * count, batch - size * count))
            given = pieces[0]
        x, keywords = parted(given[0], pipe.names)
        try:
            timed.append(_timed(pipe, size, count, partial(pipe.step, tuple(x), given[1], loss, kwargs=keywords)))
        except StageError as error:
            failure = error
        finally:
            for parameter in pipe.module.parameters():
                parameter.grad = None
    if not timed:
        assert failure is not None
        raise failure
    return timed


def _timed(pipe: Pipeline, size: int, count: int, step: Callable[[], Any]) -> _Timed:
    def once(*, overlap: bool = True) -> tuple[float, list[Span]]:
        pipe.overlap = overlap
        return seconds_of(step, pipe.devices), pipe.timeline

    # plans the layers' work for a new shape, is the first to touch memory, and leaves gradients: from now on every
    # backward pass adds to them, as all but the first of a step do, which for few samples is much of its time
    once()
    stages = len(pipe.stages)
    if not pipe.record:
        seconds = statistics.median(once()[0] for _ in range(2))
        return _Timed(size, equal_seconds(stages, count, seconds, pipe.remat), 0.0)
    begun = time.perf_counter()
    by_itself: list[Span] = []
    side_by_side: list[list[Span]] = []
    overheads_s = []
    for turn in range(ROUNDS):
        if turn and time.perf_counter() - begun > ROUNDS_S:
            break
        if len(pipe.devices) > 1:
            by_itself += once(overlap=False)[1]
        seconds, spans = once()
        side_by_side.append(spans)
        overheads_s.append(seconds - (max(span.end_s for span in spans) - min(span.start_s for span in spans)))
    orders = stage_orders(pipe.schedule, len(pipe.devices), count, pipe.stages_per_device)
    again = [recomputed(pipe.remat, order) for order in orders]
    passes: Passes = {}

    def repeated_s(span: Span) -> float:
        """Returns the seconds of the forward pass that a backward pass begins with, if it does."""
        repeats = span.kind == "backward" and span.micro in again[span.stage]
        return passes[span.stage, "forward"] if repeats else 0.0

    alone = by_itself or [span for spans in side_by_side for span in spans]
    for kind, stage in itertools.product(("forward", "backward"), range(stages)):
        its = [s.end_s - s.start_s - repeated_s(s) for s in alone if (s.stage, s.kind) == (stage, kind)]
        # medians: a pass that had to wait for something else on the machine does not count
        passes[stage, kind] = max(0.0, statistics.median(its))
    known = [[(s.start_s, s.end_s, passes[s.stage, s.kind] + repeated_s(s)) for s in spans] for spans in side_by_side]
    return _Timed(size, passes, max(0.0, min(overheads_s)), known)


def equal_seconds(stages: int, micro_batches: int, seconds: float, remat: Remat = "never") -> Passes:
    """Returns seconds of passes from a whole step's: alike in every stage, a backward pass twice a forward pass."""
    both = seconds / (micro_batches + stages - 1)  # and, if it is recomputed, the forward pass again
    forward = both / (3 if remat == "never" else 4)
    return {(k, kind): forward * work for k in range(stages) for kind, work in (("forward", 1), ("backward", 2))}


@contextmanager
def preserved(pipe: Pipeline) -> Iterator[None]:
    """Restores gradients, buffers, random state and settings at the end; inside, no loss is proven."""
    settings = {name: getattr(pipe, name) for name in ("micro_batches", "schedule", "overlap", "record", "proofs")}
    pipe.proofs = False  # they take time; the first steps of training have them
    try:
        with preserved_state(pipe.module, *pipe.devices):
            yield
    finally:
        for name, setting in settings.items():
            setattr(pipe, name, setting)
