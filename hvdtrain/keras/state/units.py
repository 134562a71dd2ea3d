"""The divisor of each loss: the unit in which ranks are weighed.

A mean over samples needs only each rank's samples, which weigh the gradients in the average (`reduce.weigh`). A mean
over something else (labels that are not ignored, unmasked steps, sample weights, positions of sequences) needs more:
during a step, every Keras loss that divides by such a number is multiplied by

    (divisor here / divisor of all ranks) x (samples of all ranks / samples here)

With the weight of the samples, the loss, its gradient and the logged loss are those of the global batch, each output's
loss in its own unit. Regularisation and `add_loss` count once a batch. Keras reduces every loss in one function,
`reduce_weighted_values`; nothing public shows the divisor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
from keras import ops

from hvdtrain.core.errors import ConfigError, ReplicaError
from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.backends.session import KEY, KerasSession, LiveBatch, hook, replaced, while_set
from hvdtrain.private.keras import CompileLoss, get_keras_mask, keras_loss, set_keras_mask

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


@dataclass(frozen=True)
class Divisor:
    """The divisor of one loss."""

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


def _means_of_batches(session: KerasSession, live: LiveBatch) -> AbstractContextManager[None]:
    """Counts a batch's number in a `Mean` as this rank's part of the global batch while open; also a value for each row
    of what `whole` joined, and an output's loss that Keras weighs by its rows."""

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
            "remove reduction= (the default is the mean)",
            shared=True,
        )
    return loss


# -------------------------------------------------------------------- the whole batch
# Every rank computes the same loss of what all ranks' models gave. The gradient of the joined outputs goes to each
# rank's own rows, times (samples of all ranks / samples here), which takes the weight of `reduce.weigh` away again.
_steps: list[KerasSession] = []  # whose train or test step runs


@contextmanager
def of_step(session: KerasSession, *, trains: bool = True) -> Iterator[None]:
    """Notes that a step runs; raises ConfigError if its loss ignored the global batch with `whole=True`."""
    _steps.append(session)
    try:
        yield
    finally:
        _steps.pop()
    if session.prepared.whole and trains and session.live is not None and not session.live.joined:
        raise ConfigError(
            "with whole=True the loss must be computed from the global batch",
            "a train_step that called neither self.compute_loss(...) nor hvdtrain.keras.whole(...)",
            "loss = self.compute_loss(y=y, y_pred=y_pred); or y, y_pred = hvdtrain.keras.whole(y, y_pred)",
            shared=True,
        )


def whole(*values: Any) -> Any:
    """Returns values of the global batch, all ranks' joined in the order of the data; collective.

    For your own `train_step` that computes its loss itself; `prepare(model, data, whole=True)` does it for
    `compute_loss`. Metrics may also take the result: each sample counts once. Outside of a prepared model's step, and
    in one process, returns the values unchanged.

    Example:
        y, y_pred = hvk.whole(y, self(x, training=True))
        loss = loss_fn(y, y_pred)

    Args:
        values: outputs and targets, nested; tensors [n, ...] whose other dimensions are those of all ranks.

    Returns:
        One value if one was given, else a tuple. Outputs have a gradient.
    """
    found = values if len(values) != 1 else values[0]
    session = _steps[-1] if _steps else None
    if session is None or session.prepared.alone or session.live is None:
        return found
    prepared, live = session.prepared, session.live
    refuse_where_ranks_part(
        live, "the whole batch is gathered by all ranks in every step", "call it in train_step itself"
    )
    leaves = [(at, leaf) for at, leaf in enumerate(keras.tree.flatten(found)) if leaf is not None]
    number = BACKEND.number_of_call(live)
    tensors = [keras.ops.convert_to_tensor(leaf) for _, leaf in leaves]
    masks = [get_keras_mask(leaf) for _, leaf in leaves]
    masked = [at for at, mask in enumerate(masks) if mask is not None]
    sent = [*tensors, *(masks[at] for at in masked)]
    name = f"{prepared.name}.whole.{number}"
    joined = BACKEND.gather_rows(sent, live.samples, live.total(), prepared.world.rank, name)
    for at, mask in zip(masked, joined[len(tensors) :], strict=True):
        set_keras_mask(joined[at], mask)
    live.own.update({id(of_all): (own, of_all) for own, of_all in zip(tensors, joined, strict=False)})
    every = iter(joined)
    return keras.tree.map_structure(lambda leaf: None if leaf is None else next(every), found)


def hook_loss(model: keras.Model) -> None:
    """Makes `model.compute_loss` see the global batch within the steps of a prepared model."""
    if hook(model, "compute_loss", partial(_compute_loss, model)):
        model.train_function = model.test_function = None


def _compute_loss(model: keras.Model, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    session: KerasSession = vars(model)[KEY]
    if not _steps or _steps[-1] is not session or session.live is None or session.prepared.alone:
        return original(*args, **kwargs)
    bound = inspect.signature(original).bind(*args, **kwargs)
    given = bound.arguments
    own = type(model).compute_loss is not keras.Model.compute_loss
    names = [name for name in ("x", "y", "y_pred", "sample_weight") if name in given and (own or name != "x")]
    given.update(zip(names, whole(tuple(given[name] for name in names)), strict=True))
    with while_set(session.live, "of_whole", True):
        return original(*bound.args, **bound.kwargs)
