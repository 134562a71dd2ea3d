"""Predicts the time of a step of a split model from a few short steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from hvdtrain.pipeline.plan.costs import Curve, Device, StageCost
from hvdtrain.pipeline.plan.simulate import simulate
from hvdtrain.pipeline.run.runtime import Pipeline
from hvdtrain.pipeline.run.worker import StageError
from hvdtrain.pipeline.trace.restore import preserved_state
from hvdtrain.pipeline.trace.tracer import parted
from hvdtrain.pipeline.tuning.unsplit import seconds_of
from hvdtrain.pipeline.values.microbatch import flat, marked, pieces_of, samples_of

MICRO_BATCHES = 3  # of a step that is timed, where the batch has so many: enough for the stages to overlap
ROUNDS = 3  # timed steps of one size

Loss = Callable[[Any, Any], Tensor]


Prediction = Callable[[Sequence[int]], float]  # from the samples of each micro-batch to the seconds of a step


def predict(pipe: Pipeline, x: Any, y: Any, loss: Loss, kwargs: Mapping[str, Any] | None = None) -> Prediction:
    """Times a few short steps, of 2 or 3 micro-batches, of at most half the batch each, and predicts what others take.

    The stages are taken to be alike, as the cut made them, and transfers to be part of their passes. Raises
    `StageError` if no step could be run; arguments as in `Pipeline.step`.
    """
    with preserved(pipe):
        # 1F1B whatever the steps will be: in fill-drain a backward pass finds little of its forward pass in a cache,
        # and takes longer than it does in a step of one micro-batch
        pipe.schedule = "1f1b"
        points = _short_steps(pipe, flat(x, kwargs, pipe.names), y, loss)
    return partial(_simulated_s, pipe, Curve(tuple(points)))


def _short_steps(pipe: Pipeline, arguments: tuple[Any, ...], y: Any, loss: Loss) -> list[tuple[int, float]]:
    """Times steps of a part of the batch, for a few sizes of a micro-batch; skips those that cannot be run. Returns
    each size, with the seconds that a forward pass of a stage then takes."""
    batch = samples_of(arguments)
    most = max(1, batch // 2)
    points, failure = [], None
    for size in sorted({1, max(1, round(math.sqrt(most))), most}):
        count = pipe.micro_batches = min(MICRO_BATCHES, batch // size)
        given = arguments, y
        if size * count < batch:
            pieces = pieces_of((marked(arguments, pipe.chunk, pipe.names), y), (size * count, batch - size * count))
            given = pieces[0]
        x, keywords = parted(given[0], pipe.names)
        step = partial(pipe.step, tuple(x), given[1], loss, kwargs=keywords)
        try:
            # plans the layers' work for a new shape, is the first to touch memory, and leaves gradients: from now on
            # every backward pass adds to them, as all but the first of a step do
            step()
            seconds = statistics.median(seconds_of(step, pipe.devices) for _ in range(ROUNDS))
            points.append((size, seconds / _simulated_s(pipe, Curve.constant(1.0), [size] * count)))
        except StageError as error:
            failure = error
        finally:
            for parameter in pipe.module.parameters():
                parameter.grad = None
    if not points:
        assert failure is not None
        raise failure
    return points


def _simulated_s(pipe: Pipeline, forward_s: Curve, sizes: Sequence[int]) -> float:
    """Returns the seconds of a step whose stages take so long for a forward pass, and twice as long for a backward."""
    stages = [StageCost(Device(str(device)), forward_s, 2 * forward_s) for device in pipe.devices]
    return simulate(stages, sizes=sizes, schedule=pipe.schedule, remat=pipe.remat).step_s


@contextmanager
def preserved(pipe: Pipeline) -> Iterator[None]:
    """Restores gradients, buffers, random state and settings at the end; inside, no loss is proven."""
    settings = {name: getattr(pipe, name) for name in ("micro_batches", "schedule", "proofs")}
    pipe.proofs = False  # they take time; the first steps of training have them
    try:
        with preserved_state(pipe.module, *pipe.devices):
            yield
    finally:
        for name, setting in settings.items():
            setattr(pipe, name, setting)
