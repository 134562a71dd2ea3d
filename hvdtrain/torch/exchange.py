"""Checkpoints to and from PyTorch's own DCP (torch.distributed.checkpoint), and weights as plain safetensors.

A DCP directory of ours holds what plain scripts keep there: "model" and "optim", as PyTorch's `get_state_dict` gives
them; and under "hvdtrain" what else a run needs to go on. PyTorch reads and writes it. Its index is a pickle, which
runs code when it is loaded as PyTorch does: here the classes that an index consists of are all that it may name, and
values are read with `weights_only=True`.
"""

from __future__ import annotations

import io
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hvdtrain.checkpoint.checkpoint import Checkpointer
from hvdtrain.checkpoint.checkpoint_files import read_manifest
from hvdtrain.checkpoint.parts import Part, Progress
from hvdtrain.checkpoint.staging import StateFile
from hvdtrain.core.errors import CheckpointError, ConfigError
from hvdtrain.torch.dcp_tree import check_kept, cut, like, nested, outline
from hvdtrain.torch.plain_files import read, revived, write, write_tensors
from hvdtrain.world.world import World

MODEL, TRAINING, OURS = "model.safetensors", "training.pt", "hvdtrain"
_PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
}  # fmt: skip

_UNKNOWN: dict[str, Any] = {  # of a training that was none of ours
    "format": 1, "optimizer": None, "optimizer_class": None,
    "precision": {"scaler": {}, "skipped_steps": 0, "unit": 1.0}, "progress": {}, "loader": None, "streams": [],
}  # fmt: skip


# -- out of a run ----------------------------------------------------------------------------------------------------
def export(run: Path, target: Path, to: str, *, which: str = "latest", model: str, optimizer: str) -> Path:
    """Writes a checkpoint of a run in another format; returns which it was.

    Args:
        run: the run's directory, that of its checkpoints, or one checkpoint.
        target: a directory that is made.
        to: "dcp", or "safetensors", of the weights alone.
        which: "latest" or "best".
        model, optimizer: the key of each in the DCP state; "app.model" is within another.

    Raises:
        CheckpointError: no checkpoint is whole, or it is not one of PyTorch.
        ConfigError: the directory is not empty; the optimizer has parameters without a name, or state that DCP loses.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("a checkpoint is exported into a directory of its own", f"{target} is there")
    taken = _Taken()
    folder, which = _folder_of(run, which)
    if Checkpointer(folder, world=World.solo(), asynchronous=False).restore({MODEL: taken}, which=which) is None:
        raise CheckpointError("there is a checkpoint to export", f"none in {folder}")
    path = taken.path.parent
    if to == "safetensors":
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(taken.path, target / MODEL)
        return path
    manifest = read_manifest(path)
    tensors, told = _tensors_of([taken.path])
    shared = {other: name for other, name in told.items() if name in tensors}
    rest: dict[str, Any] = {
        "told": told, "progress": manifest["progress"], "metrics": manifest["metrics"],
        "files": {name: _bytes((path / name).read_bytes()) for name in {*manifest["files"]} - {MODEL, TRAINING}},
    }  # fmt: skip
    state: dict[str, Any] = {}
    _put(state, model, {**tensors, **{other: tensors[name] for other, name in shared.items()}})
    if TRAINING in manifest["files"]:
        content = read(path / TRAINING)
        exact, described = revived(content["optimizer"]), content.get("parameters", ())
        _put(state, optimizer, _by_name(revived(content["optimizer"], np.generic.item), described))
        rest["training"] = {**content, "optimizer": None}
        rest["outline"] = outline(_by_name(exact, described))
        back = like(nested(*cut(state), tuple(optimizer.split("."))), rest["outline"])  # what an import will find
        check_kept(exact, _by_number(back, {})[0], "the optimizer's state")
    packed = io.BytesIO()
    torch.save(rest, packed)
    state[OURS] = _bytes(packed.getvalue())
    with _alone():
        dcp.save(state, checkpoint_id=target, no_dist=True)
    return path


@contextmanager
def _alone() -> Iterator[None]:
    """PyTorch warns of what is meant: one process does it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _folder_of(run: Path, which: str) -> tuple[Path, str]:
    if (run / "manifest.json").exists():
        return run.parent, str(run)
    return (run / "checkpoints" if (run / "checkpoints").is_dir() else run), which


class _Taken(Part):
    """Where a file is that is whole."""

    path = Path()

    def load(self, path: Path) -> None:
        self.path = path


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _put(state: dict[str, Any], key: str, value: Any) -> None:
    *outer, last = key.split(".")
    for name in outer:
        state = state.setdefault(name, {})
    state[last] = value


def _by_name(optimizer: Mapping[str, Any], described: Sequence[Any]) -> dict[str, Any]:
    """Returns an optimizer's state as PyTorch's `get_optimizer_state_dict` has it: by the parameters' names."""
    order = [number for group in optimizer["param_groups"] for number in group["params"]]
    names: dict[Any, Any] = dict(zip(order, (name for name, *_ in described), strict=False))
    if not all(names.get(number) for number in order):
        raise ConfigError(
            "DCP keeps an optimizer's state by the names of the model's parameters",
            f"{sum(not names.get(number) for number in order)} of {len(order)} parameters have none in this checkpoint",
            "save once more, with the model's own parameters in the optimizer; or export the weights: --to safetensors",
        )
    return {
        **optimizer,
        "state": {names.get(key, key): state for key, state in optimizer["state"].items()},
        "param_groups": [
            group | {"params": [names[number] for number in group["params"]]} for group in optimizer["param_groups"]
        ],
    }


# -- into a run -----------------------------------------------------------------------------------------------------
def import_(
    source: Path,
    run: Path,
    *,
    model: str | None = None,
    optimizer: str | None = None,
    optimizer_class: str | None = None,
    progress: Mapping[str, int] | None = None,
) -> Path:
    """Makes a checkpoint of a DCP directory, of a safetensors file, or of a directory of those; returns its path.

    Args:
        source: whatever wrote it, with any number of ranks.
        run: the directory of a run, which need not exist: the checkpoint goes into its `checkpoints`.
        model, optimizer: the keys of both in a DCP state; None: as they are usually called.
        optimizer_class: such as "AdamW"; of what hvdtrain exported it is known.
        progress: fields of `Progress`, where the training stands.

    Raises:
        CheckpointError: it cannot be read, or not without running code.
        ConfigError: its keys, or the optimizer's class, have to be said.
    """
    if (source / ".metadata").exists():
        state, training, told, ours = _from_dcp(source, model, optimizer, optimizer_class)
    else:
        state, told = _tensors_of(sorted(source.glob("*.safetensors")) if source.is_dir() else [source])
        training, ours = None, {}
    place = Progress(**{**ours.get("progress", _steps_of(training)), **(progress or {})})
    parts: dict[str, Part] = {MODEL: _Given(lambda file: write_tensors(state, {"format": "pt", **told}, file))}
    if training is not None:
        training["progress"] = asdict(place)
        parts[TRAINING] = _Given(lambda file: write(training, file, "training state"))
    for name, data in ours.get("files", {}).items():
        if Path(name).name == name:
            parts[name] = _Given(lambda file, data=data: file.write(data.numpy()))  # type: ignore[misc]
    checkpoints = Checkpointer(run / "checkpoints", world=World.solo(), asynchronous=False, keep=sys.maxsize)
    return checkpoints.save(parts, progress=place, metrics=ours.get("metrics"))


class _Given(Part):
    """A file of what is known already."""

    def __init__(self, written: Callable[[StateFile], object]) -> None:
        self._written = written

    def write(self, file: StateFile) -> None:
        self._written(file)


def _from_dcp(
    source: Path, model: str | None, optimizer: str | None, optimizer_class: str | None
) -> tuple[dict[str, Tensor], dict[str, Any] | None, dict[str, str], dict[str, Any]]:
    """Returns the weights, what training.pt holds, what model.safetensors is told, and what else is ours."""
    reader = _Reader(source)
    index = reader.read_metadata()
    paths: dict[str, tuple[str | int, ...]] = {
        key: tuple(name if type(name) is int else str(name) for name in (index.planner_data or {}).get(key, (key,)))
        for key in index.state_dict_metadata
    }
    in_text = {key: tuple(map(str, path)) for key, path in paths.items()}
    places = {path[:depth] for path in in_text.values() for depth in range(1, len(path))}
    at_model = _key(places, model, ("model", "model_state_dict", "state_dict"))
    at_optimizer = _key(places, optimizer, ("optim", "optimizer", "optimizer_state_dict"))
    if at_model is None or (at_optimizer is None and optimizer is not None):
        tops = ", ".join(sorted({place[0] for place in in_text.values()}))
        raise ConfigError(
            "the keys of model and optimizer in a DCP state are known",
            f"{(model or 'model') if at_model is None else optimizer} is not among {tops}",
            "--model-key KEY, --optimizer-key KEY; app.model is the model within app",
        )
    wanted = [at for at in (at_model, at_optimizer, (OURS,)) if at is not None]
    state: dict[str, Any] = {}  # flat: DCP's own way back leaves the lists and dicts to whoever loads
    for key, path in in_text.items():
        if any(path[: len(at)] == at for at in wanted):
            about = index.state_dict_metadata[key]
            place = None
            if isinstance(about, TensorStorageMetadata):
                place = torch.empty(about.size, dtype=about.properties.dtype)
            state[key] = place
    try:
        with _alone():
            dcp.load(state, storage_reader=reader, planner=_Planner(), no_dist=True)
    except CheckpointException as error:
        failure, *_ = (wrapped[0] for wrapped in error.failures.values())
        if isinstance(failure, pickle.UnpicklingError):
            raise _unsafe(source, str(failure).partition("WeightsUnpickler error: ")[2] or failure) from error
        raise CheckpointError("a DCP checkpoint is whole", f"{source}: {type(failure).__name__}: {failure}") from error
    ours = _ours(state.get(OURS))
    weights = _weights(nested(paths, state, at_model))
    told = {other: name for other, name in ours.get("told", {}).items() if other != "format"}
    kept = {name: tensor for name, tensor in weights.items() if name not in told}
    if at_optimizer is None:
        return kept, None, told, ours
    known = ours.get("training") or _UNKNOWN
    name = optimizer_class or known.get("optimizer_class")
    if name is None:
        raise ConfigError(
            "a run goes on with the optimizer it began with, and DCP does not say which that was",
            f"{source} has the state of one",
            "give its class: --optimizer AdamW",
        )
    numbered, described = _by_number(like(nested(paths, state, at_optimizer), ours.get("outline")), weights)
    training = {**known, "optimizer_class": name, "optimizer": numbered}
    if described:
        training["parameters"] = described
    return kept, training, told, ours


class _Index(pickle.Unpickler):
    """Reads an index that names nothing but what one consists of."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, (torch.dtype, torch.layout)):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


class _Reader(dcp.FileSystemReader):
    """Reads what lies in its directory, and runs no code."""

    def read_metadata(self, *args: Any, **kw: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with open(path, "rb") as file:
                index = _Index(file).load()
        except Exception as error:  # whatever a damaged pickle makes of itself
            raise _unsafe(path, error) from error
        places = index.storage_data.values() if isinstance(index, Metadata) and index.storage_data else ()
        outside = [place.relative_path for place in places if PurePath(place.relative_path).name != place.relative_path]
        if not isinstance(index, Metadata) or outside:
            raise _unsafe(path, f"it points to {outside[0]}" if outside else "it is of another kind")
        return index


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """As PyTorch's own, which would run code."""
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _unsafe(path: Path, error: object) -> CheckpointError:
    return CheckpointError(
        "a DCP checkpoint is read without running code",
        f"{path}: {error}",
        "keep objects of your own classes out of what is imported; a file that you do not know may be an attack",
    )


def _key(places: set[tuple[str, ...]], given: str | None, usual: Sequence[str]) -> tuple[str, ...] | None:
    """Returns where a key is; by its usual names also one level below."""
    tops = sorted({place[0] for place in places})
    wanted = [tuple((given or "").split("."))]
    if given is None:
        wanted = [(name,) for name in usual] + [(top, name) for name in usual for top in tops]
    return next((place for place in wanted if place in places), None)


def _ours(packed: Tensor | None) -> dict[str, Any]:
    found: dict[str, Any] = (
        {} if packed is None else torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
    )
    return found


def _weights(found: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns a model's tensors, by the plain module's names."""
    weights = {}
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise CheckpointError("a model's state consists of tensors", f"{name} is a {type(value).__name__}")
        weights[_plain_name(name, found)] = value
    return weights


def _plain_name(name: str, all_names: Mapping[str, Any]) -> str:
    for prefix in _PREFIXES:
        if all(other.startswith(prefix) for other in all_names):
            return _plain_name(name.removeprefix(prefix), {other.removeprefix(prefix): 0 for other in all_names})
    return name


def _by_number(found: Mapping[str, Any], weights: Mapping[str, Tensor]) -> tuple[dict[str, Any], list[Any]]:
    """Returns an optimizer's state as the optimizer itself has it, and its parameters: name, shape, type."""
    groups = found.get("param_groups")
    if not isinstance(groups, list):
        raise CheckpointError(
            "an optimizer's state has state and param_groups, as get_optimizer_state_dict() or state_dict() gives them",
            f"it has {', '.join(map(str, list(found)[:3]))}",
            "save it without flatten_optimizer_state_dict",
        )
    order = [str(name) for group in groups for name in group["params"]]
    numbers = iter(range(len(order)))
    param_groups = [group | {"params": [next(numbers) for _ in group["params"]]} for group in groups]
    number_of: dict[str, Any] = {name: number for number, name in enumerate(order)}
    state = {number_of.get(str(key), key): value for key, value in (found.get("state") or {}).items()}
    plain = {name: _plain_name(name, dict.fromkeys(order)) for name in order}
    known = all(name in weights for name in plain.values())  # else they were numbered
    described = (
        [[name, list(weights[name].shape), str(weights[name].dtype)] for name in plain.values()] if known else []
    )
    return {**found, "state": state, "param_groups": param_groups}, described


def _steps_of(training: Mapping[str, Any] | None) -> dict[str, int]:
    """Where a training stands as far as its optimizer knows: updates."""
    states = (training or {}).get("optimizer", {}).get("state", {}).values()
    steps = (int(state["step"]) for state in states if isinstance(state, dict) and "step" in state)
    return {"step": max(steps, default=0)}


def _tensors_of(files: Sequence[Path]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors of safetensors files, and what their headers tell."""
    tensors: dict[str, Tensor] = {}
    told: dict[str, str] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
                told |= file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise CheckpointError("weights are a safetensors file", f"{path}: {error}") from error
    if not tensors:
        raise CheckpointError("there is a checkpoint to read", "neither a DCP directory nor a safetensors file")
    return tensors, {other: name for other, name in told.items() if name in tensors and other not in tensors}
