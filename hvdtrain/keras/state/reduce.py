"""Averages gradients over ranks (dense, sparse, in low precision, weighted by each rank's live samples), and reduces
arrays of the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.comm.elastic import repeated
from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.backends.session import LiveBatch, Prepared
from hvdtrain.world.world import World

_REDUCIBLE = ("float16", "float32", "float64")  # Horovod's TensorFlow operations take no bfloat16 and unsigned types


def weigh(gradients: Sequence[Any], live: LiveBatch, ranks: Any) -> list[Any]:
    """Multiplies gradients by live samples x ranks / live samples of all ranks: exactly 1 for equal shares."""
    where = [i for i, gradient in enumerate(gradients) if gradient is not None]
    dense = [gradients[i].values if BACKEND.is_sparse(gradients[i]) else gradients[i] for i in where]
    if not dense:
        return list(gradients)
    weighed = BACKEND.weigh(dense, live.samples, live.total(), ranks)
    out = list(gradients)
    for i, tensor in zip(where, weighed, strict=True):
        out[i] = BACKEND.with_values(gradients[i], tensor) if BACKEND.is_sparse(gradients[i]) else tensor
    return out


def average(gradients: Sequence[Any], prepared: Prepared, ranks: Any, name: str) -> list[Any]:
    """Returns the mean over ranks of each gradient; `None` entries stay.

    Dense gradients travel as one group per dtype, `IndexedSlices` as slices. `sparse_as_dense` turns them dense first:
    less traffic for small tables, but Adam-like optimizers of plain Keras do not sum duplicate rows before squaring.
    """
    out = list(gradients)
    dense: list[int] = []
    for i, gradient in enumerate(gradients):
        if gradient is None:
            continue
        if BACKEND.is_sparse(gradient):
            if not prepared.sparse_as_dense:
                out[i] = BACKEND.gather_sparse(gradient, f"{name}.sparse.{i}", ranks)
                continue
            out[i] = BACKEND.densify(gradient)
        dense.append(i)
    return _reduce_groups(out, dense, "average", name, ranks, half=prepared.compression == "fp16")


def maximum(gradients: Sequence[Any], variables: Sequence[Any], ranks: Any, name: str) -> list[Any]:
    """Reduces the gradients that overwrite their variable (float8 scales), with the maximum, as Keras does."""
    where = [i for i, g in enumerate(gradients) if g is not None and overwrites(variables[i])]
    return _reduce_groups(list(gradients), where, "max", f"{name}.max", ranks)


def overwrites(variable: Any) -> bool:
    """Returns True for a variable that Keras sets to its gradient instead of stepping along it."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _reduce_groups(
    tensors: list[Any], where: Sequence[int], op: str, name: str, ranks: Any, *, half: bool = False
) -> list[Any]:
    """Reduces `tensors[i] for i in where` in place of the list, one group per dtype."""
    groups: dict[str, list[int]] = {}
    for i in where:
        groups.setdefault(keras.backend.standardize_dtype(tensors[i].dtype), []).append(i)
    for dtype in sorted(groups):
        members, operation = groups[dtype], op
        sent = [tensors[i] for i in members]
        if half and op == "average" and dtype in ("float32", "float64"):
            # divided before the cast: a sum of N values then fits wherever one value does
            sent = [keras.ops.cast(tensor / keras.ops.cast(ranks, dtype), "float16") for tensor in sent]
            operation = "sum"
        elif dtype not in _REDUCIBLE:
            sent = [keras.ops.cast(tensor, "float32") for tensor in sent]
        received = BACKEND.reduce(sent, operation, f"{name}.{dtype}")
        for i, tensor in zip(members, received, strict=True):
            tensors[i] = keras.ops.cast(tensor, dtype)
    return tensors


def summed(arrays: Sequence[np.ndarray], world: World, kind: str) -> list[np.ndarray]:
    """Returns the sums of arrays over ranks in float64, which travel as one; collective. `kind`: of what."""
    flat = on_host(np.concatenate([np.asarray(a, np.float64).reshape(-1) for a in arrays]), "sum", world, kind)
    parts = np.split(flat, np.cumsum([np.size(array) for array in arrays])[:-1])
    return [part.reshape(np.shape(array)) for part, array in zip(parts, arrays, strict=True)]


@repeated
def on_host(values: np.ndarray, op: str, world: World, kind: str) -> np.ndarray:
    """Returns the `sum`, `min` or `max` over ranks of an array; collective."""
    with world.in_step(kind):
        return BACKEND.host_allreduce(values, op, f"hvdtrain.{kind}")
