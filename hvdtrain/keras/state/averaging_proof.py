"""Proves, on the user's own model and optimizer, that gradients are averaged over ranks and replicas are
equal.

The proof applies one update to the real weights through the real outermost `optimizer.apply`, with
gradients that are known and different on every rank, and compares the outcome with the update of their mean;
then it puts everything back, bit for bit. Nothing is assumed about how the averaging is done, so an optimizer
that does it itself passes as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from hvdtrain.core.errors import ReplicaError
from hvdtrain.core.proof import Proof
from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.backends.session import (
    HOOKS,
    KerasSession,
    LiveBatch,
    is_hooked,
    is_stock,
    leaves_of,
    missing_hook,
    while_set,
)
from hvdtrain.keras.state import replicas
from hvdtrain.keras.state.reduce import overwrites

# A power of two, so that a step along a coarse gradient is exact in every dtype.
_RATE = 2.0**-6
_TOLERANCE = 1e-6  # of the largest step: an optimizer's own averaging may round differently than Horovod's


def prove(model: keras.Model, session: KerasSession) -> Proof:
    """Runs the proof; collective. The model and its optimizer must be built.

    Raises:
        ReplicaError: on every rank; replicas differ, or gradients are not averaged.
    """
    started = time.perf_counter()
    world, optimizer = session.prepared.world, model.optimizer
    if is_stock(optimizer):  # it cannot even list its variables
        raise missing_hook(model.name, optimizer)
    replicas.check_equal(replicas.replicated(model), world, when="when training starts (forgotten broadcast?)")
    variables = [v for v in model.trainable_variables if not overwrites(v)]
    factor = 1.0 + 2.0 * (world.rank - (world.size - 1) / 2.0)  # ... -1, 1, 3 ...: the mean over ranks is exactly 1
    with _scratch(model, optimizer, session):
        start = _values(variables)
        pattern = _pattern(optimizer, variables)
        averaged = _update(optimizer, variables, _times(pattern, factor))
        mean = _plain_update(optimizer, variables, _times(pattern, 1.0))
        alone = _plain_update(optimizer, variables, _times(pattern, factor))
    step = _largest(mean, start)
    difference = _largest(averaged, mean)
    own = _largest(averaged, alone)
    reports = world.gather((step, difference, own))
    largest = max(max(step for step, _, _ in reports), np.finfo(np.float64).tiny)
    tolerance = _TOLERANCE * largest
    if not all(np.isfinite(d) and d <= tolerance for _, d, _ in reports):
        raise _not_averaged(model, [d for _, d, _ in reports], [o for _, _, o in reports], tolerance)
    if variables and max(world.gather(_largest(mean, alone))) <= tolerance:
        raise ReplicaError(
            "the proof needs an optimizer whose update depends on the gradient",
            f"{type(optimizer).__name__} makes the same update for different gradients (largest step {step:.3g})",
            "prepare(model, verify=False) if that is meant",
            shared=True,
        )
    difference = max(gap for _, gap, _ in reports) / largest
    return Proof(world.size, len(variables), difference, replicas.fingerprint(model), time.perf_counter() - started)


def _not_averaged(model: keras.Model, off: Sequence[float], own: Sequence[float], tolerance: float) -> ReplicaError:
    if not is_hooked(model.optimizer):
        return missing_hook(model.name, model.optimizer)
    local = all(value <= tolerance for value in own)
    return ReplicaError(
        "one update must use the mean of all ranks' gradients",
        "\n".join(f"rank {rank}: off by {value:.6g} (tolerance {tolerance:.3g})" for rank, value in enumerate(off))
        + ("\nevery rank applied its own gradient" if local else ""),
        "hvdtrain.keras.prepare(model), once, with the optimizer that trains; do not change its apply()",
        shared=True,
    )


# -------------------------------------------------------------------- trial updates
def _update(optimizer: Any, variables: Sequence[Any], gradients: list[Any]) -> list[np.ndarray]:
    """Applies gradients as training would; returns the weights after it, and takes it back."""
    touched = list({id(v): v for v in [*variables, *replicas.state_of(optimizer)]}.values())
    with replicas.unchanged(touched):
        optimizer.apply(gradients, list(variables))
        return _values(variables)


def _plain_update(optimizer: Any, variables: Sequence[Any], gradients: list[Any]) -> list[np.ndarray]:
    """Makes the same update by this rank alone: hooks out of the way."""
    holders = [optimizer, *leaves_of(optimizer)]
    kept = [{name: vars(holder).pop(name) for name in HOOKS if name in vars(holder)} for holder in holders]
    try:
        return _update(optimizer, variables, gradients)
    finally:
        for holder, methods in zip(holders, kept, strict=True):
            vars(holder).update(methods)


def _pattern(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Gradients (times the loss scale) with few significant bits, so that sums over ranks are exact."""
    scale = getattr(optimizer, "dynamic_scale", None)
    scale = float(BACKEND.to_numpy(scale)) if scale is not None else float(optimizer.loss_scale_factor or 1.0)
    out = []
    for position, variable in enumerate(variables):
        eight = ((np.arange(8) * 5 + position) % 8 - 3.5) / 4.0 * scale  # in -0.875 .. 0.875, never 0
        value = np.resize(eight.astype(np.float32), tuple(variable.shape))
        out.append(keras.ops.convert_to_tensor(value, dtype=variable.dtype))
    return out


def _times(pattern: Sequence[Any], factor: float) -> list[Any]:
    """New tensors: an averaging may work in place."""
    return [tensor * keras.ops.cast(factor, tensor.dtype) for tensor in pattern]


def _values(variables: Sequence[Any]) -> list[np.ndarray]:
    values = [np.array(BACKEND.to_numpy(variable)) for variable in variables]
    return [v if v.dtype in (np.float32, np.float64) else v.astype(np.float32) for v in values]


def _largest(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> float:
    gaps = [float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True) if x.size]
    return float(np.max(gaps)) if gaps else 0.0  # np.max, unlike max, keeps NaN


# -------------------------------------------------------------------- scratch state
@contextmanager
def _scratch(model: keras.Model, optimizer: Any, session: KerasSession) -> Iterator[None]:
    """Sets the optimizer up for one telling update (rate > 0, update due), and undoes everything."""
    size = session.prepared.world.size
    live = LiveBatch(1.0, lambda: float(size))  # as within a step: all ranks have samples, as many
    rates = [(leaf, vars(leaf)["_learning_rate"]) for leaf in leaves_of(optimizer)]
    with replicas.unchanged(replicas.everything(model)), while_set(session, "live", live):
        try:
            for leaf, _ in rates:
                vars(leaf)["_learning_rate"] = _RATE
                steps = leaf.gradient_accumulation_steps
                if steps:
                    leaf._iterations.assign(steps - 1)
                    for accumulator in leaf._accumulated_gradients:
                        if accumulator is not None:
                            accumulator.assign(keras.ops.zeros_like(accumulator))
            yield
        finally:
            for leaf, rate in rates:
                vars(leaf)["_learning_rate"] = rate
