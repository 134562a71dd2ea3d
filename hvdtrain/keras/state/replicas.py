"""The state that makes replicas: which variables belong to it; compares them, and makes them equal."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from hvdtrain.comm.engines import CHUNK_BYTES
from hvdtrain.core.errors import NonFiniteError, ReplicaError
from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.backends.session import leaves_of, optimizers_of, session_of
from hvdtrain.keras.state import reduce
from hvdtrain.world.same_data import is_statistic
from hvdtrain.world.world import World

_MANY = 1 << 16  # elements of a variable that are compared to name one that differs


# -------------------------------------------------------------------- which variables
def _unique(variables: Sequence[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())


def optimizer_variables(model: keras.Model) -> list[Any]:
    """Iteration counters, learning rates, slots, loss scales of all the model's optimizers."""
    return _unique([variable for optimizer in optimizers_of(model) for variable in state_of(optimizer)])


def state_of(optimizer: Any) -> list[Any]:
    """An optimizer's variables, and those that it does not list."""
    return [*optimizer.variables, *unlisted(optimizer)]


def unlisted(optimizer: Any) -> list[Any]:
    """Variables that an optimizer holds, and Keras neither lists nor saves: Nadam's within a `LossScaleOptimizer`."""
    listed = {id(variable) for variable in optimizer.variables}
    held = [v for leaf in leaves_of(optimizer) for v in vars(leaf).values() if isinstance(v, keras.Variable)]
    return [variable for variable in held if id(variable) not in listed]


def accumulators(model: keras.Model) -> list[Any]:
    """Gradients accumulated so far: the one part of an optimizer that is each rank's own between updates."""
    found: list[Any] = []
    for optimizer in optimizers_of(model):
        for leaf in leaves_of(optimizer):
            found += [v for v in getattr(leaf, "_accumulated_gradients", []) if v is not None]
    return found


def replicated(model: keras.Model) -> list[Any]:
    """Variables that are bit-equal on all ranks after every step: trainable weights and optimizer state."""
    own = {id(variable) for variable in accumulators(model)}
    return [v for v in _unique([*model.trainable_weights, *optimizer_variables(model)]) if id(v) not in own]


def everything(model: keras.Model) -> list[Any]:
    """Returns all variables: weights, metric states, seed generators, optimizer state."""
    metrics = [variable for metric in model.metrics for variable in metric.variables]
    return _unique([*model.variables, *untrained(model), *metrics, *optimizer_variables(model)])


@contextmanager
def unchanged(variables: Sequence[Any]) -> Iterator[None]:
    """Undoes what happens to variables while open."""
    before = BACKEND.copies(variables)
    try:
        yield
    finally:
        BACKEND.put_back(variables, before)


class Buffer:
    """A buffer of a PyTorch module in a Keras layer, as what is asked of a `keras.Variable`; to Keras it is none."""

    def __init__(self, path: str, value: Any) -> None:
        self.path, self.value = path, value
        self.dtype, self.shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)

    def assign(self, value: Any) -> None:
        self.value.copy_(keras.ops.convert_to_tensor(value))


def torch_modules(model: keras.Model) -> list[tuple[str, Any]]:
    """The PyTorch modules that Keras layers hold, each with its layer's path."""
    wrapped = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.TorchModuleWrapper)]
    return [(layer.path or layer.name, layer.module) for layer in wrapped]


def untrained(model: keras.Model) -> list[Any]:
    """Returns the variables and buffers that are not trained, and that may follow each rank's own samples."""
    buffers = [
        Buffer(f"{path}/{name.replace('.', '/')}", buffer)
        for path, module in torch_modules(model)
        for name, buffer in module.named_buffers()
    ]
    return [*model.non_trainable_weights, *buffers]


def path_of(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)


# -------------------------------------------------------------------- equal?
def fingerprint(model: keras.Model) -> str:
    """Returns the SHA-256 (hex) of all the model's weights, moving statistics included; local, not collective.

    It is equal on all ranks after every epoch and after `fit`.

    Example:
        world.agree("model", hvk.fingerprint(model))
    """
    digest = hashlib.sha256()
    for variable in model.weights:
        value = BACKEND.to_numpy(variable)
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def check_equal(variables: Sequence[Any], world: World, *, when: str, model: keras.Model | None = None) -> None:
    """Raises ReplicaError on every rank, naming the first variable whose checksum differs; collective.

    The fix for a `model` that is not prepared begins with that.
    """
    if not variables:
        return
    differing = _differing(variables, world)
    if not differing.size:
        return
    first = variables[int(differing[0])]
    value = np.asarray(BACKEND.to_numpy(first)).astype(np.float64).reshape(-1)
    summary = f"sum {value.sum():.9g}, largest {np.abs(value).max():.9g}"
    summaries, parts = zip(*world.gather((summary, value[:_MANY])), strict=True)
    where = int(np.argmax((np.stack(parts) != parts[0]).any(axis=0)))  # the first that differs, of those compared
    lines = [
        f"rank {rank}: {summary}, element {where}: {float(part[where])!r}"
        for rank, (summary, part) in enumerate(zip(summaries, parts, strict=True))
    ]
    prepared = model is None or session_of(getattr(model, "optimizer", None)) is not None
    raise ReplicaError(
        f"replicas must be equal {when}: {differing.size} of {len(variables)} variables differ, first {path_of(first)}",
        "\n".join(lines),
        ("" if prepared else "hvdtrain.keras.prepare(model, data), before training;\n")
        + "fit(callbacks=[*hvdtrain.keras.callbacks(model), ...]) starts all ranks from rank 0's state;\n"
        "change weights and learning rates alike on every rank: not in a callback of rank 0 only,\n"
        "and not by the logs of a batch, which are each rank's own (world.mean(logs) is the same on all)",
        shared=True,
    )


def checksum(variable: Any) -> int:
    """Returns a signed 64-bit checksum of a variable's bits and their order."""
    value = np.ascontiguousarray(BACKEND.to_numpy(variable)).reshape(-1).view(np.uint8)
    return int.from_bytes(hashlib.blake2b(value.data, digest_size=8).digest(), "little", signed=True)


def _differing(variables: Sequence[Any], world: World) -> np.ndarray:
    """Returns the indices of the variables that differ over the ranks; collective."""
    checksums = np.array([checksum(variable) for variable in variables], np.int64)
    both = np.concatenate([checksums, ~checksums])
    low_high = reduce.on_host(both, "min", world, "comparison of the replicas")
    return np.flatnonzero(low_high[: len(checksums)] != ~low_high[len(checksums) :])


def _is_statistic(variable: Any) -> bool:
    return is_statistic(path_of(variable)) and "float" in str(variable.dtype)


def _is_finite(value: Any) -> bool:
    """Returns True if all values are finite; their sum shows it in one pass, unless it overflows."""
    finite = keras.ops.isfinite
    return bool(finite(keras.ops.sum(value))) or bool(keras.ops.all(finite(value)))


def check_finite(model: keras.Model, world: World) -> None:
    """Raises NonFiniteError on every rank for a trained weight or moving statistic that is not finite; collective."""
    watched = [*model.trainable_weights, *filter(_is_statistic, model.non_trainable_weights)]
    bad = [path_of(v) for v in watched if not _is_finite(v.value)]
    reports = world.gather(bad)
    if any(reports):
        raise NonFiniteError(
            "weights that are not finite are not saved: training has diverged",
            "\n".join(f"rank {rank}: {', '.join(names[:3])}" for rank, names in enumerate(reports) if names),
            "lower the learning rate, or clip gradients (clipnorm=1.0 of the optimizer),\n"
            "or stop at a NaN loss (keras.callbacks.TerminateOnNaN);\n"
            "then restore an earlier checkpoint: they are untouched",
            shared=True,
            code=42,
        )


# -------------------------------------------------------------------- make equal
def check_same_variables(variables: Sequence[Any], world: World) -> None:
    """Refuses ranks whose models have other numbers, shapes or dtypes of variables; names may differ; collective."""
    kinds = {f"variable {number}": f"{tuple(v.shape)} {v.dtype}" for number, v in enumerate(variables)}
    world.agree_all(
        {"number of variables": len(variables), **kinds},
        "every rank must build the same model and optimizer: the {} differs",
        lambda _: "build and compile the model from the same flags and data shapes on every rank",
    )


def broadcast(variables: Sequence[Any], world: World, root: int = 0) -> None:
    """Sets variables to root's values, bit for bit and whatever the dtype; collective."""
    ends = itertools.accumulate(int(np.prod(variable.shape)) * 8 for variable in variables)
    sends = world.rank == root
    # in messages of about CHUNK_BYTES, each of whole variables
    for _, pairs in itertools.groupby(zip(variables, ends, strict=True), lambda pair: pair[1] // CHUNK_BYTES):
        group = [variable for variable, _ in pairs]
        values = world.broadcast([np.array(BACKEND.to_numpy(v)) for v in group] if sends else None, root)
        for variable, value in zip(group, values or (), strict=True) if not sends else ():
            variable.assign(value)


def average(variables: Sequence[Any], world: World) -> None:
    """Sets float variables to their mean over ranks, others (counters) to rank 0's value; collective."""
    if world.size == 1 or not variables:
        return
    floats = [v for v in variables if "float" in str(v.dtype)]
    others = [v for v in variables if "float" not in str(v.dtype)]
    if floats:
        values = [BACKEND.to_numpy(v) for v in floats]
        sums = reduce.summed(values, world, "average of statistics")
        for variable, value, total in zip(floats, values, sums, strict=True):
            variable.assign((total / world.size).astype(value.dtype))
    if others:
        broadcast(others, world)


def average_statistics(model: keras.Model, world: World) -> None:
    """Makes untrained state equal on all ranks: the mean of moving statistics (BatchNorm's), rank 0's value of anything
    else that differs; collective. Then the checkpoint of rank 0 is the state of every rank."""
    variables = untrained(model)
    if world.size == 1 or not variables:
        return
    differ = [variables[index] for index in _differing(variables, world)]
    average([v for v in differ if _is_statistic(v)], world)
    broadcast([v for v in differ if not _is_statistic(v)], world)


def parted(model: keras.Model, world: World) -> list[str]:
    """Names what is neither trained nor a moving statistic, and differs by rank (a layer's codebook); collective."""
    variables = [v for v in untrained(model) if not _is_statistic(v)]
    if not variables:
        return []
    return [path_of(variables[index]) for index in _differing(variables, world)]
