"""Tries, on the user's own batches, whether the loss of a batch is put together from those of its pieces.

N ranks compute the loss of their pieces; one process would compute that of the whole. The two agree for a mean over
samples, labels, steps or weights, for a sum, and for terms without data. They do not agree for a loss that looks at a
batch as a whole (dice over the batch, contrastive pairs within it) or a function that returns a sum. So the batch is
evaluated whole and in two pieces, weighed as ranks weigh them, in training mode; or in inference mode if something is
drawn in training, or a batch is normalised. The training state is not changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import tree

from hvdtrain.core.decomposition import LossGradients, bound, compared, judge
from hvdtrain.core.errors import ReplicaError
from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.backends.session import KerasSession, has_own_step, map_leaves
from hvdtrain.keras.state import metric_states, replicas, rng, units
from hvdtrain.keras.state.sync_batchnorm import is_synchronized, normalises

ROWS = 16  # of the first batch: enough to decide, cheap for large models
ROUNDING = 0.05  # of the bound: of the loss of outputs that are 0, where the loss itself is next to nothing

_ADDED = (
    "what layers add (add_loss) is computed on each rank's own rows, also with whole=True: add a mean over samples; or"
    " return the tensors it is computed from, and compute it in compute_loss, or in a train_step from what"
    " hvk.whole(...) returns; if each rank's own value is meant, prepare(model, verify=False)"
)
_REMEDY = (
    "prepare(model, data, whole=True): the loss of the global batch, whatever it is, but for what layers add"
    " (add_loss); or a loss that returns one value per sample (Dice(axis=(1, 2, 3)), no ops.sum or ops.mean over the"
    " batch) and layers that look at each sample separately (batch normalisation: keras.layers.BatchNormalization); if"
    " each rank's own is meant, or this is a false alarm, prepare(model, verify=False)"
)


def check(model: keras.Model, session: KerasSession, *, is_first: bool) -> None:
    """Compares whole and pieces of this rank's last batch; of the first one, metrics as well; collective.

    Raises:
        ReplicaError: on every rank; the loss does not decompose.
    """
    data = session.notes.kept_batch
    normalising = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    synchronized = [layer for layer in normalising if is_synchronized(layer)]
    of_torch = any(normalises(part) for _, module in replicas.torch_modules(model) for part in module.modules())
    data = _of_several(data, session)
    if not has_own_step(model):
        # a synchronised one would wait for the other ranks, one of PyTorch refuses a single sample
        trains = not synchronized and not of_torch and model._call_has_training_arg
        mine = _judge(model, data, trains=trains, normalises=bool(normalising), added=session.prepared.whole)
    else:
        mine = (
            "note",
            "this model's own train_step: that its loss is a mean over pieces of a batch is not checked; what it does"
            " to gradients it does to each rank's own, before the average (clipping: clipnorm= of the optimizer)"
            + _added_up(model),
        )
    metrics = _other_metrics(model, data) if is_first and mine[0] != "differs" and not has_own_step(model) else []
    reports, named = zip(*session.prepared.world.gather((mine, metrics)), strict=True)
    for kind, text in reports:
        if kind == "note":
            session.prepared.say(text, once=text)
            break
    for text in next((texts for texts in named if texts), []):
        session.prepared.say(
            f"not the metric of one process: {text}; keep sums over samples in its states, or one value a sample"
        )
    if is_first:
        _say_of_layers(model, session, of_torch or len(synchronized) < len(normalising))
    if any(kind == "differs" for kind, _ in reports):
        raise ReplicaError(
            "the loss of a batch must be the mean (or the sum) of those of its pieces: ranks compute pieces",
            "\n".join(f"rank {rank}: {text}" for rank, (kind, text) in enumerate(reports) if kind == "differs"),
            _ADDED if session.prepared.whole else _REMEDY,
            shared=True,
        )


def _added_up(model: keras.Model) -> str:
    """Names the metrics of a model's own step of which only the user knows whether their states add up over ranks."""
    kinds = ((metric.name, type(metric)) for metric in model.metrics)
    unknown = [name for name, kind in kinds if kind is keras.metrics.Sum or not kind.__module__.startswith("keras.")]
    if not unknown:
        return ""
    return f"; the states of {', '.join(unknown)} are added up over ranks, which is right for sums over samples"


def _say_of_layers(model: keras.Model, session: KerasSession, normalises_apart: bool) -> None:
    if normalises_apart:
        session.prepared.say(
            "batch normalisation: each rank normalises by its own part of the global batch (keras.layers."
            "BatchNormalization and prepare(model, sync_batchnorm=True): by all of it)"
        )
    moving = replicas.parted(model, session.prepared.world)
    if moving:
        session.prepared.say(
            f"{', '.join(moving)}: follows each rank's own samples within an epoch; then all ranks get that of rank 0"
        )


def _of_several(data: Any, session: KerasSession) -> Any:
    """The batch, or those of all ranks where each has a single sample, which has no pieces; collective."""
    rows = None if data is None else _first_rows(data)[1]
    if any(its is None or its > 1 for its in session.prepared.world.gather(rows)):
        return data
    batches = session.prepared.world.gather(map_leaves(keras.ops.convert_to_numpy, data))
    return tree.map_structure(lambda *own: None if own[0] is None else np.concatenate(own), *batches)


def _judge(model: keras.Model, data: Any, *, trains: bool, normalises: bool, added: bool = False) -> tuple[str, str]:
    """Returns ("fine" | "differs" | "note", what was seen); of what layers `added` alone, or of all; local."""
    if data is None:
        return "fine", ""
    batch, rows = _first_rows(data)
    if rows < 2:
        return "note", "a batch of one sample has no pieces: that the loss is a mean over samples was not checked"
    try:
        with _scratch(model):
            found = trained = _compared(model, batch, rows, training=trains, added=added)
            if normalises or trained.whole != trained.again:  # what is drawn, or normalised, is so for each piece
                found = _compared(model, batch, rows, training=False, added=added)
    except Exception as error:  # whatever a user's model does with a batch of another size
        return "note", f"the loss was not checked on pieces of a batch: {type(error).__name__}: {str(error)[:200]}"
    if not np.isfinite(found.whole):
        return "note", f"the loss of a batch is {found.whole}: it was not checked on pieces of a batch"
    if found.whole != found.again:
        return "note", "the model draws random numbers in inference: its loss was not checked on pieces of a batch"
    if found.differs:
        sizes = f"{found.first} and {rows - found.first}"
        return "differs", f"loss {found.whole:.9g} of {rows} samples, {found.together:.9g} from pieces of {sizes}"
    if trained.added != found.added:
        return "note", "losses that layers add in training only were not checked on pieces of a batch"
    if found.functions:
        return (
            "note",
            "a loss returns one number for a batch: that it is a mean over samples is tried at steps 1, 2, 4, 8 ... and"
            " an epoch's first; one value a sample is right on any",
        )
    return "fine", ""


@dataclass(frozen=True)
class _Compared:
    """The loss of a batch, and that of its pieces."""

    whole: float
    again: float  # of the batch, computed a second time
    together: float  # of its pieces: the first so many samples (`first`), and the others
    differs: bool  # by more than rounding
    first: int
    functions: int  # losses that return one number for a batch
    added: int  # losses that layers add


def _compared(model: keras.Model, batch: Any, rows: int, *, training: bool, added: bool) -> _Compared:
    first, loss = max(1, rows // 4), partial(_loss, model, training=training, added=added)
    (whole, _, functions), (again, _, _) = (loss(batch) for _ in range(2))
    losses = len(model.losses)
    together, scale = 0.0, abs(whole)
    pieces = (slice(0, first), slice(first, rows))
    parts = [_cut(batch, piece) for piece in pieces]
    values, known, _ = zip(*map(loss, parts), strict=True)
    for part, value, own, piece in zip(parts, values, known, pieces, strict=True):
        share = (piece.stop - piece.start) / rows
        weights = [_share(mine, all_, share) for mine, all_ in zip(own, _add(known), strict=True)]
        weighed = value if all(weight == 1.0 for weight in weights) else loss(part, weights)[0]
        together, scale = together + share * weighed, max(scale, abs(share * weighed))
    gaps = compared(LossGradients(whole), [LossGradients(together)], [1.0])
    limit = _limit(model)
    differs = math.isfinite(gaps.loss) and judge(gaps, gradient=0.0, loss=limit * scale) != "holds"
    if differs:
        rounding = limit * ROUNDING * _untrained(loss, batch)
        differs = judge(gaps, gradient=0.0, loss=rounding) != "holds"
    return _Compared(whole, again, together, differs, first, functions, losses)


def _untrained(loss: Callable[..., tuple[float, Any, int]], batch: Any) -> float:
    """Returns the size of the loss of outputs that are 0; 0.0 if it has none."""
    try:
        value = abs(loss(batch, untrained=True)[0])
    except Exception:  # a loss of the user's that is none of zeros
        return 0.0
    return value if math.isfinite(value) else 0.0


def _limit(model: keras.Model) -> float:
    of_torch = BACKEND.name == "torch" and "float64" in (keras.config.floatx(), model.compute_dtype)
    return bound("loss", ["float32" if of_torch else model.compute_dtype])  # stock losses round on PyTorch


def _other_metrics(model: keras.Model, data: Any) -> list[str]:
    """Names the metrics whose states do not add up over pieces of a batch (a maximum); local."""
    if data is None or model._compile_metrics is None or not model._compile_metrics.built:
        return []
    batch, rows = _first_rows(data)
    first = max(1, rows // 4)
    if rows < 2 or model.compute_metrics.__func__ is not keras.Model.compute_metrics:
        return []

    def of(*pieces: slice) -> dict[str, Any]:
        """The metrics of pieces as of ranks: each has states of its own, which are added (or averaged)."""
        states = []
        for piece in pieces:
            model.reset_metrics()
            x, y, weight = _cut(batch, piece)
            model.compute_metrics(x=x, y=y, y_pred=_predicted(model, x), sample_weight=weight)
            states.append([np.asarray(value, np.float64) for _, value in metric_states.states(model)])
        sizes = [piece.stop - piece.start for piece in pieces]
        for (variable, value), *parts in zip(metric_states.states(model), *states, strict=True):
            is_mean = getattr(variable, "aggregation", "sum") == "mean"
            together = np.average(parts, axis=0, weights=sizes) if is_mean else np.sum(parts, axis=0)
            variable.assign(together.astype(value.dtype))
        return metric_states.computed(model)

    try:
        with _scratch(model), BACKEND.no_gradient():
            whole, pieces = of(slice(0, rows)), of(slice(0, first), slice(first, rows))
    except Exception:  # whatever a user's metric does with a batch of another size
        return []
    return [
        f"{name} is {np.mean(value):.5g} of {rows} samples, {np.mean(pieces[name]):.5g} put together from {first} and"
        f" {rows - first}"
        for name, value in whole.items()
        if name != "loss" and np.isfinite(value).all() and not np.allclose(value, pieces[name], rtol=1e-3, atol=1e-6)
    ]


def _first_rows(data: Any) -> tuple[tuple[Any, ...], int]:
    """Returns x, y and sample weights of a batch's first samples, and how many those are."""
    data = map_leaves(lambda a: keras.ops.convert_to_tensor(a[:ROWS]), data)
    batch = (*data, None, None)[:3] if isinstance(data, (tuple, list)) else (data, None, None)
    return batch, len(next(leaf for leaf in tree.flatten(batch[0]) if leaf is not None))


def _cut(batch: Any, piece: slice) -> Any:
    return map_leaves(lambda a: a[piece], batch)


def _predicted(model: keras.Model, x: Any, *, training: bool = False) -> Any:
    return model(x, training=training) if model._call_has_training_arg else model(x)


def _share(mine: float | None, together: float, share: float) -> float:
    """Returns the factor of a piece's loss, relative to the piece's share of samples."""
    if mine is None:
        return 1.0 / share
    return mine / together / share if together else 0.0


def _add(known: Sequence[list[Any]]) -> list[float]:
    return [0.0 if pieces[0] is None else sum(pieces) for pieces in zip(*known, strict=True)]


def _loss(
    model: keras.Model,
    batch: Any,
    weights: list[float] | None = None,
    *,
    training: bool = False,
    untrained: bool = False,
    added: bool = False,
) -> tuple[float, list[Any], int]:
    """The loss of the outputs in inference or training mode, or what layers `added` to it, what each Keras loss in it
    divided by (`weights` multiply those), and how many others return one number for a batch.
    """
    divisors: list[Any] = []
    own = 0

    def weigh(loss: Any, divisor: units.Divisor) -> Any:
        divisors.append(None if divisor.value is None else float(keras.ops.convert_to_numpy(divisor.value)))
        return loss if weights is None else loss * weights[len(divisors) - 1]

    def whole() -> None:
        nonlocal own
        own += 1

    x, y, weight = batch
    weight = map_leaves(lambda w: w + 0, weight)  # Keras on torch multiplies it in place
    with BACKEND.no_gradient(), units.observed(weigh, (x, y), whole):
        outputs = _predicted(model, x, training=training)
        if added:
            return float(sum(map(keras.ops.convert_to_numpy, model.losses), np.float64(0))), [], 0
        outputs = map_leaves(keras.ops.zeros_like, outputs) if untrained else outputs
        loss = model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weight, training=True)
    return float(keras.ops.convert_to_numpy(loss)), divisors, own


@contextmanager
def _scratch(model: keras.Model) -> Iterator[None]:
    """Restores what a forward pass and a loss may change, which includes weights (`SpectralNormalization`)."""
    own = {id(v) for v in replicas.optimizer_variables(model)}
    variables = [v for v in replicas.everything(model) if id(v) not in own]
    random = rng.capture(model)
    try:
        with replicas.unchanged(variables):
            yield
    finally:
        rng.restore(model, random)
