"""What each loss divides by: the unit in which ranks are weighed.

A mean over samples needs the samples of each rank only, and those weigh the gradients when they are averaged
(`reduce.weigh`). A mean over something else (labels that are not ignored, steps that are not masked, sample weights,
positions of sequences whose length varies) needs more: while a step runs, every Keras loss that divides by such a
number is multiplied by

    (divisor here / divisor of all ranks) x (samples of all ranks / samples here)

Together with the weight of the samples that makes the loss, its gradient and the loss that is logged those of the
global batch, each output's loss in its own unit. Regularisation and `add_loss` keep theirs: once a batch.

Keras reduces every loss in one function, `reduce_weighted_values`, and nothing public shows what it divided by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops
from keras.src.losses import loss as keras_loss
from keras.src.trainers.compile_utils import CompileLoss

from hvdtrain.core.errors import ConfigError, ReplicaError
from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.backends.session import KerasSession, LiveBatch, replaced

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


@dataclass(frozen=True)
class Divisor:
    """What one loss divided by."""

    value: Any  # a scalar, additive over pieces of a batch; None for a sum
    by_samples: bool  # known to be a multiple of the samples, the same on all ranks and in all steps
    rows: Any  # of what was reduced


def observed(
    weigh: Callable[[Any, Divisor], Any], data: Any, whole: Callable[[], None] = lambda: None
) -> AbstractContextManager[None]:
    """Replaces every Keras loss over a batch by `weigh(value, divisor)` while open; calls `whole` for one number."""

    def reduce(
        original: Any, values: Any, sample_weight: Any = None, mask: Any = None, reduction: Any = MEANS[0],
        dtype: Any = None,
    ) -> Any:  # fmt: skip
        loss = original(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
        if len(values.shape) == 0:
            whole()
            return loss
        if reduction in (None, "none"):
            return loss
        return weigh(loss, divisor_of(values, sample_weight, mask, reduction, data))

    return replaced(keras_loss, "reduce_weighted_values", reduce)


def divisor_of(values: Any, sample_weight: Any, mask: Any, reduction: str, data: Any) -> Divisor:
    """Returns what `reduce_weighted_values` divides by, given its arguments."""
    rows = ops.shape(values)[0]
    if reduction == "sum":
        return Divisor(None, False, rows)
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        dtype = values.dtype
        # a copy: on torch Keras multiplies the weights in place, and autograd has saved them
        weight = None if sample_weight is None else ops.copy(ops.convert_to_tensor(sample_weight, dtype=dtype))
        merged = keras_loss.apply_mask(weight, mask, dtype=dtype, reduction=reduction)
        return Divisor(BACKEND.total(merged), False, rows)
    size = BACKEND.elements(values)
    if mask is None:
        return Divisor(size, BACKEND.by_samples(values, data), rows)
    return Divisor(size * BACKEND.total(mask) / BACKEND.elements(mask), False, rows)


@contextmanager
def weighed(session: KerasSession, data: Any) -> Iterator[None]:
    """Counts losses in this step (`session.live`) as parts of the global batch's while open; collective if needed."""
    live, count = session.live, 0
    assert live is not None

    def weigh(loss: Any, divisor: Divisor) -> Any:
        nonlocal count
        if divisor.by_samples or live.of_whole:
            return loss
        session.proofs.by_samples = False
        refuse_where_ranks_part(
            live,
            "a loss that does not divide by samples (masks, ignore_class, sample weights, sums) is weighed over ranks:"
            " all must reach it in every step",
            "compute the loss in train_step itself",
        )
        count += 1
        if divisor.value is None:
            part = BACKEND.times(loss, 1.0, live.total(), 1.0, live.samples)
        else:
            mine = BACKEND.unless_zero(divisor.value, live.samples)
            total = BACKEND.finish_sum(BACKEND.start_sum(mine, f"{session.prepared.name}.divisor.{count}"))
            part = BACKEND.times(loss, mine, live.total(), total, live.samples)
        if not live.joined:
            return part
        return ops.where(_is_of_all(loss, divisor.rows, session, live), loss, part)

    with observed(weigh, data), _means_of_batches(session, live), replaced(CompileLoss, "call", _one_number):
        yield


def _is_of_all(value: Any, rows: Any, session: KerasSession, live: LiveBatch) -> Any:
    """True if a value is of what `whole` joined: all ranks have reduced all ranks' rows, to one value; collective."""
    mine = ops.stack([ops.cast(rows, "float64"), ops.cast(ops.stop_gradient(value), "float64")])
    name = f"{session.prepared.name}.of_all.{BACKEND.number_of_call(live)}"
    (every,) = BACKEND.gather_rows([mine[None]], live.samples, live.total(), session.prepared.world.rank, name)
    of_first = every[:1, 1]
    alike = ops.abs(every[:, 1] - of_first) <= 1e-6 * ops.abs(of_first)
    return ops.all(ops.logical_and(every[:, 0] == live.total(), alike))


@contextmanager
def as_it_is(live: LiveBatch) -> Iterator[None]:
    """While open, losses are of the global batch already."""
    live.of_whole = True
    try:
        yield
    finally:
        live.of_whole = False


def _means_of_batches(session: KerasSession, live: LiveBatch) -> AbstractContextManager[None]:
    """Counts one number for a batch in a `Mean` as this rank's part of the global batch while open.

    So does a value for each row of what `whole` joined, and an output's loss that Keras weighs by its rows.
    """

    def update_state(original: Any, self: Any, values: Any, sample_weight: Any = None) -> Any:
        shape, here = getattr(values, "shape", ()), not BACKEND.in_branch() and BACKEND.usable_here(live.samples)
        if len(shape) and live.joined and here:
            rows = ops.shape(values)[0]
            part = BACKEND.times(ops.ones((rows,), "float64"), live.samples, 1.0, live.total(), 1.0)
            part = ops.where(_is_of_all(ops.mean(values), rows, session, live), part, ops.ones_like(part))
            given = part if sample_weight is None else ops.cast(sample_weight, "float64")
            part = ops.reshape(part, (-1, *[1] * (len(given.shape) - 1)))
            sample_weight = part if sample_weight is None else given * part
        elif live.of_whole and isinstance(sample_weight, int) and here:
            sample_weight = live.samples
        elif not len(shape) and sample_weight is None and here:
            if live.even is False and session.proofs.by_samples:
                sample_weight = live.samples  # a rank may have more batches to evaluate than others: no word with them
            else:
                sample_weight = BACKEND.times(ops.ones((), "float64"), live.samples, 1.0, live.total(), 1.0)
        return original(self, values, sample_weight)

    return replaced(keras.metrics.Mean, "update_state", update_state)


def refuse_where_ranks_part(live: LiveBatch, rule: str, fix: str) -> None:
    """Raises `ReplicaError` where ranks may take different ways, or the batch in flight is not known."""
    if BACKEND.in_branch() or not BACKEND.usable_here(live.samples):
        raise ReplicaError(rule, "it is called inside a tf.cond, or a tf.function of its own", fix)


def _one_number(original: Callable[..., Any], self: CompileLoss, *args: Any, **kwargs: Any) -> Any:
    """Calls the loss that `compile` was given; refuses one without a reduction, which only a `train_step` may use."""
    loss = original(self, *args, **kwargs)
    if len(getattr(loss, "shape", ())):
        losses = [loss for loss in keras.tree.flatten(self._user_loss) if loss is not None]
        bare = [type(loss).__name__ for loss in losses if getattr(loss, "reduction", MEANS[0]) in (None, "none")]
        raise ConfigError(
            "the loss of a batch must be one number: its mean, or its sum",
            f"reduction=None in {', '.join(bare)}",
            "leave reduction out (the default is the mean)",
            shared=True,
        )
    return loss
