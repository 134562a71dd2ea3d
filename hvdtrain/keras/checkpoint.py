"""The parts of a checkpoint: the model as Keras saves it, every rank's random state, and the user's objects."""

from __future__ import annotations

import io
import json
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from hvdtrain.checkpoint.parts import ExtraPart, Part, Progress
from hvdtrain.checkpoint.staging import StateFile
from hvdtrain.core.errors import CheckpointError, ConfigError
from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.backends.session import (
    KerasSession,
    TrainingPlace,
    is_built,
    optimizers_of,
    replaced,
    require_compiled,
    session_of,
)
from hvdtrain.keras.state import callback_counts, metric_states, replicas, rng
from hvdtrain.private.keras import BaseOptimizer, H5IOStore, saving_lib
from hvdtrain.world.world import World

# the beginnings of Keras' warnings about values that it does not load
_NOT_LOADED = ("Skipping ", "A total of ")


class KerasModelPart(Part):
    """`model.keras`: `keras.models.load_model` opens it without Horovod and without hvdtrain."""

    def __init__(self, model: keras.Model, session: KerasSession) -> None:
        self.model = model
        self.session = session

    @property
    def trained(self) -> object:
        return self.model

    def collect(self) -> None:
        """Makes what is each rank's own one: moving statistics, and gradients accumulated so far."""
        world = self.session.prepared.world
        if is_built(self.model) and not self.model.optimizer.built:  # as load() does: so both have slots
            self.model.optimizer.build(self.model.trainable_variables)
        if is_built(self.model) and self.session.place.streams_set:  # training has begun
            replicas.average_statistics(self.model, world)
            replicas.average(replicas.accumulators(self.model), world)
        replicas.check_finite(self.model, world)

    def write(self, file: StateFile) -> None:
        if not file.in_memory:
            self.model.save(file)
            return
        others = _Archive()
        with _weights_go_into(file):
            self.model.save(others)
        file.seek(file.size)
        file.write(others.getbuffer())

    def load(self, path: Path) -> None:
        """Reads weights and optimizer state into the model; raises CheckpointError for those of another one."""
        if not is_built(self.model):
            raise CheckpointError(
                "a model must be built before a checkpoint is loaded into it",
                f"model {self.model.name!r} has no weights yet",
                "give it a keras.Input, or call model.build(input_shape)",
            )
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                _check_optimizer(self.model, path)
                self.model.load_weights(path)
            for warning in caught:
                if str(warning.message).startswith(_NOT_LOADED):
                    raise ValueError(str(warning.message))
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        except (ValueError, KeyError) as error:
            unbuilt = [optimizer.name for optimizer in optimizers_of(self.model) if not optimizer.built]
            if unbuilt:
                raise CheckpointError(
                    "an optimizer must be built before a checkpoint is loaded into it",
                    f"{', '.join(unbuilt)} has no slots yet: its first step makes them",
                    "call optimizer.build(the variables that it updates) before the restore",
                ) from error
            raise CheckpointError(
                f"the checkpoint must be of this model and optimizer ({path.name})",
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
                "build the model and compile it as the run did that wrote it, or start a new run directory",
            ) from error


class _Archive(io.BytesIO):
    def __str__(self) -> str:
        return "model.keras"  # Keras looks for it


class _Seen:
    """Gives an array to who copies what it is given, as Keras does: without a copy, as it is only read."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._array


@contextmanager
def _weights_go_into(file: StateFile) -> Iterator[None]:
    """Writes the weights of a model that this thread saves into the image, not into Keras' archive."""
    thread, stores = threading.get_ident(), list[H5IOStore]()
    kinds: dict[str, set[str]] = {}

    def opened(plain: Callable[..., h5py.File], store: H5IOStore, path: Any, mode: str | None = None) -> h5py.File:
        if threading.get_ident() != thread or not store.archive or stores:
            return plain(store, path, mode)
        stores.append(store)
        store.archive = None  # which they do not go into
        file.entry = (str(path), 0)
        return h5py.File(file, "w")

    def put(plain: Callable[..., None], store: H5IOStore, key: str, value: Any) -> None:
        if store in stores:
            value = BACKEND.to_numpy(value) if isinstance(value, keras.Variable) else value
            value = _Seen(value) if isinstance(value, np.ndarray) else value
        plain(store, key, value)

    def saved(plain: Callable[..., None], optimizer: Any, store: H5IOStore) -> None:
        def numpy(plain: Callable[..., np.ndarray], variable: Any) -> np.ndarray:
            return BACKEND.to_numpy(variable) if threading.get_ident() == thread else plain(variable)

        # not for another thread's: two that replace at a time may put back each other's
        with replaced(keras.Variable, "numpy", numpy) if store in stores else nullcontext():
            plain(optimizer, store)

    def skipped(plain: Callable[[str], set[str]], kind: str) -> set[str]:
        if kind not in kinds:  # for each object Keras makes a layer and lists its attributes
            kinds[kind] = plain(kind)
        return kinds[kind]

    with (
        replaced(H5IOStore, "_get_h5_file", opened),
        replaced(H5IOStore, "__setitem__", put),
        replaced(BaseOptimizer, "save_own_variables", saved),
        replaced(saving_lib, "get_attr_skipset", skipped),
    ):
        yield
    if file.entry is not None:
        file.entry = (file.entry[0], file.size)


def _check_optimizer(model: keras.Model, path: Path) -> None:
    """Optimizers of two classes may have slots of the same shapes, which Keras loads by their order."""
    with zipfile.ZipFile(path) as file:
        saved = json.loads(file.read("config.json")).get("compile_config")
    classes = [_optimizer_in(config) for config in (saved, model.get_compile_config())]
    if None not in classes and classes[0] != classes[1]:
        raise ValueError(f"optimizer {classes[0]} in the checkpoint, {classes[1]} here")


def _optimizer_in(compiled: Any) -> str | None:
    """Returns the class of an optimizer as `compile` was given it, if it is known: in lower case, as names are."""
    found = compiled.get("optimizer") if isinstance(compiled, dict) else None
    name = found.get("class_name") if isinstance(found, dict) else found
    return name.lower() if isinstance(name, str) else None


class RandomPart(Part):
    """`random.npz`: what `model.keras` lacks, as plain arrays: every rank's random state, the data's identity, the
    counts of Keras' callbacks, variables of layers with LoRA (`model.keras` has their product), unlisted ones of
    optimizers."""

    def __init__(self, model: keras.Model, place: TrainingPlace, world: World) -> None:
        self.model, self.place, self.world = model, place, world
        self.states: list[dict[str, np.ndarray]] = []
        self.counts: callback_counts.States = {}

    def collect(self) -> None:
        mine = rng.capture(self.model)
        if self.place.progress.samples_in_epoch:
            mine |= {f"metric.{i}": array for i, (_, array) in enumerate(metric_states.states(self.model))}
        self.states = self.world.gather(mine)
        self.counts = callback_counts.saved_of(self.place.callbacks)

    def write(self, file: StateFile) -> None:
        arrays = {f"{rank}/{key}": value for rank, state in enumerate(self.states) for key, value in state.items()}
        kept = {f"kept.{i}": keras.ops.convert_to_numpy(v) for i, v in enumerate(_not_in_file(self.model))}
        order = {} if self.place.order is None else {"order": np.array(self.place.order)}
        counted = {"counts": _as_bytes(_packed(self.counts, arrays, "callbacks"))}
        np.savez(file, world_size=np.array(len(self.states)), **order, **arrays, **kept, **counted)  # type: ignore[arg-type]

    def load(self, path: Path) -> None:
        """Puts this rank's state back; at another world size, streams that follow from rank 0's."""
        with np.load(path, allow_pickle=False) as stored:
            size = int(stored["world_size"])
            same_size = size == self.world.size
            count = sum(key.startswith("0/metric.") for key in stored.files)
            metrics = [[stored[f"{rank}/metric.{i}"] for i in range(count)] for rank in range(size)]
            sums = [np.sum(arrays, axis=0) * int(self.world.is_main) for arrays in zip(*metrics, strict=True)]
            self.place.restored_metrics = metrics[self.world.rank] if same_size else sums
            mine = self.world.rank if same_size else 0
            state = {key.partition("/")[2]: stored[key] for key in stored.files if key.startswith(f"{mine}/")}
            for index, variable in enumerate(_not_in_file(self.model)):
                variable.assign(stored[f"kept.{index}"])
            self.place.order = str(stored["order"]) if "order" in stored.files else None
            self.place.restored_counts = _unpacked(json.loads(stored["counts"].tobytes()), stored)
        rng.restore(self.model, state)
        if not same_size:
            rng.apply_derived(self.model, state, self.world.rank)
            state = rng.capture(self.model)
        self.place.restored_random = state

    def restored(self, progress: Progress) -> None:
        self.place.progress = progress


def _not_in_file(model: keras.Model) -> list[Any]:
    layers = [layer for layer in model._flatten_layers() if getattr(layer, "lora_enabled", False)]
    unlisted = [variable for optimizer in optimizers_of(model) for variable in replicas.unlisted(optimizer)]
    return [*(variable for layer in layers for variable in layer.variables), *unlisted]


class KerasExtra(ExtraPart):
    """`extra.npz`: objects of the user's own; arrays, and their structure as JSON."""

    def state_of(self, value: Any) -> Any:
        if _has_variables(value):
            return [v.numpy() for v in value.variables]
        return value.numpy() if isinstance(value, keras.Variable) else super().state_of(value)

    def put_back(self, value: Any, saved: Any) -> Any:
        variables = value.variables if _has_variables(value) else [value] if isinstance(value, keras.Variable) else []
        if variables:
            received = saved if _has_variables(value) else [saved]
            if len(received) != len(variables):
                raise ValueError(f"{len(received)} variables in the checkpoint, {len(variables)} here")
            for variable, array in zip(variables, received, strict=True):
                variable.assign(array)
        elif isinstance(value, np.ndarray):
            if value.shape != saved.shape:
                raise ValueError(f"shape {saved.shape} in the checkpoint, {value.shape} here")
            value[...] = saved
        elif keras.ops.is_tensor(value):
            return keras.ops.convert_to_tensor(saved, dtype=value.dtype)
        else:
            return super().put_back(value, saved)
        return value

    def write(self, file: StateFile) -> None:
        arrays: dict[str, np.ndarray] = {}
        np.savez(file, structure=_as_bytes(_packed(self.states(), arrays, "extra")), **arrays)  # type: ignore[arg-type]

    def load(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as stored:
            self.restore(_unpacked(json.loads(stored["structure"].tobytes()), stored))


def _as_bytes(packed: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(packed).encode(), np.uint8)


def _has_variables(value: Any) -> bool:
    return isinstance(value, (keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric))


def _packed(value: Any, arrays: dict[str, np.ndarray], where: str) -> Any:
    """Returns `value` as JSON has it, in lists that begin with their kind; its arrays are put into `arrays`."""
    if isinstance(value, np.generic) and value.dtype.kind in "biufU":
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        pairs = [
            (_packed(k, arrays, f"a key of {where}"), _packed(v, arrays, f"{where}[{k!r}]")) for k, v in value.items()
        ]
        return ["dict", pairs]
    if type(value) in (list, tuple):
        items = [_packed(item, arrays, f"{where}[{index}]") for index, item in enumerate(value)]
        return [type(value).__name__, items]
    if isinstance(value, keras.Variable) or keras.ops.is_tensor(value):
        value = keras.ops.convert_to_numpy(value)
    if isinstance(value, np.ndarray):
        if value.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):  # types that numpy does not know
            value = value.astype(np.float32)
        if value.dtype.kind in "biufc":
            arrays[f"array.{len(arrays)}"] = value
            return ["array", f"array.{len(arrays) - 1}"]
    raise ConfigError(
        "a checkpoint must contain only numbers, text and arrays: loading must not run code",
        f"{where} is a {type(value).__name__}",
        "give such objects state_dict() and load_state_dict()",
    )


def _unpacked(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "array":
        return arrays[content]
    if kind == "dict":
        return {_unpacked(key, arrays): _unpacked(item, arrays) for key, item in content}
    items = [_unpacked(item, arrays) for item in content]
    return tuple(items) if kind == "tuple" else items


def model_state(model: keras.Model, *, extra: MutableMapping[str, Any] | None = None) -> Mapping[str, Part]:
    """Returns the parts of this model's checkpoint, for `Checkpointer.save` and `restore`.

    `save` takes the current state on every rank. It averages state that differs between ranks (moving statistics and
    accumulated gradients) and gathers random states. It refuses weights that are not finite (`NonFiniteError`).

    Example:
        progress = checkpoints.restore(hvk.model_state(model))
        model.fit(data, epochs=10, initial_epoch=progress.epoch if progress else 0, callbacks=hvk.callbacks(model))

    Args:
        model: compiled and prepared.
        extra: your own objects, as rank 0 has them, by name: a Keras model, layer, metric, optimizer or variable, an
            object with `state_dict` and `load_state_dict`, or numbers, text, arrays, and dicts and lists of those. A
            restore loads objects and arrays in place and puts other values into this dict.

    Returns:
        `{"model.keras": ..., "random.npz": ...}`, with extra `"extra.npz"`.

    Raises:
        ConfigError: the model has no optimizer, or is not prepared. While saving: an object of extra cannot be saved
            safely; the message names it.
    """
    require_compiled(model)
    session: KerasSession | None = session_of(model)
    if session is None:
        raise ConfigError(
            "a model must be prepared before saving", f"model {model.name!r} is not", "hvdtrain.keras.prepare(model)"
        )
    parts: dict[str, Part] = {
        "model.keras": KerasModelPart(model, session),
        "random.npz": RandomPart(model, session.place, session.prepared.world),
    }
    return parts if extra is None else {**parts, "extra.npz": KerasExtra(extra)}
