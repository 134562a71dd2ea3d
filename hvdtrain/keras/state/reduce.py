"""Averages gradients over ranks: dense, sparse, in low precision, weighted by each rank's live samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.backends.session import KerasSession


def weigh(gradients: Sequence[Any], session: KerasSession) -> list[Any]:
    """Multiplies this rank's gradients by live samples x ranks / live samples of all ranks.

    The average over ranks of the result is then the gradient of the mean over all samples, whatever the
    shares; with equal shares the factor is exactly 1 and the gradients pass untouched. Outside a prepared
    train step (a custom loop that calls `optimizer.apply` itself) every rank weighs the same.
    """
    live = session.live
    if live is None:
        return list(gradients)
    if not BACKEND.usable_here(live.samples):
        session.say("optimizer.apply runs in a tf.function of its own: batches of unequal size weigh the same there")
        return list(gradients)
    where = [i for i, gradient in enumerate(gradients) if gradient is not None]
    dense = [gradients[i].values if BACKEND.is_sparse(gradients[i]) else gradients[i] for i in where]
    if not dense:
        return list(gradients)
    weighed = BACKEND.weigh(dense, live.samples, live.total(), session.ranks)
    out = list(gradients)
    for i, tensor in zip(where, weighed, strict=True):
        out[i] = BACKEND.with_values(gradients[i], tensor) if BACKEND.is_sparse(gradients[i]) else tensor
    return out


def average(gradients: Sequence[Any], session: KerasSession, name: str) -> list[Any]:
    """Returns the mean over ranks of each gradient; `None` entries stay.

    Dense gradients travel as one group per dtype; `IndexedSlices` keep their sparsity: the slices of all
    ranks are gathered (`sparse_as_dense` turns them dense first: less traffic for small tables, but
    Adam-like optimizers then give another result than plain Keras, which does not sum duplicate rows before
    squaring them).
    """
    out = list(gradients)
    dense: list[int] = []
    for i, gradient in enumerate(gradients):
        if gradient is None:
            continue
        if BACKEND.is_sparse(gradient):
            if not session.sparse_as_dense:
                out[i] = BACKEND.gather_sparse(gradient, f"{name}.sparse.{i}", session.ranks)
                continue
            out[i] = BACKEND.densify(gradient)
        dense.append(i)
    return _reduce_groups(out, dense, "average", name, session)


def maximum(gradients: Sequence[Any], variables: Sequence[Any], session: KerasSession, name: str) -> list[Any]:
    """Reduces only the gradients that overwrite their variable (float8 scales), with the maximum, as Keras
    does.
    """
    where = [i for i, g in enumerate(gradients) if g is not None and overwrites(variables[i])]
    return _reduce_groups(list(gradients), where, "max", f"{name}.max", session)


def overwrites(variable: Any) -> bool:
    """True for a variable that Keras sets to its gradient instead of stepping along it."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _reduce_groups(tensors: list[Any], where: Sequence[int], op: str, name: str, session: KerasSession) -> list[Any]:
    """Reduces `tensors[i] for i in where` in place of the list, one group per dtype."""
    groups: dict[str, list[int]] = {}
    for i in where:
        groups.setdefault(keras.backend.standardize_dtype(tensors[i].dtype), []).append(i)
    half = session.compression == "fp16"
    for dtype in sorted(groups):
        members = groups[dtype]
        received = BACKEND.reduce([tensors[i] for i in members], op, f"{name}.{dtype}", half=half, size=session.ranks)
        for i, tensor in zip(members, received, strict=True):
            tensors[i] = tensor
    return tensors
