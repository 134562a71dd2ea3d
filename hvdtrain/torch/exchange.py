"""Checkpoints out of a run and into one: as a plain file of PyTorch, and weights as safetensors.

The PyTorch file has "model" and "optim" by names, as PyTorch's `get_state_dict` gives them, and under "hvdtrain" the
rest, in bytes: PyTorch's own tools turn the file into DCP (torch.distributed.checkpoint), which makes text of the keys
of dicts and drops empty dicts.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from hvdtrain.checkpoint.checkpoint import Checkpointer
from hvdtrain.checkpoint.checkpoint_files import read_manifest
from hvdtrain.checkpoint.parts import Part, Progress
from hvdtrain.checkpoint.staging import StateFile
from hvdtrain.core.errors import CheckpointError, ConfigError
from hvdtrain.torch.checkpoint import once_each
from hvdtrain.torch.plain_files import read, revived, write, write_tensors
from hvdtrain.world.world import World

MODEL, TRAINING, OURS = "model.safetensors", "training.pt", "hvdtrain"
_PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
_REMEDY = """torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, FILE);
of DCP: torch.distributed.checkpoint.format_utils.dcp_to_torch_save(DIR, FILE)"""
_UNKNOWN: dict[str, Any] = {  # of another program's training
    "format": 1, "precision": {"scaler": {}, "skipped_steps": 0, "unit": 1.0}, "loader": None, "streams": [],
}  # fmt: skip


class _File(Part):
    """A file of a checkpoint: `written` writes it; `path` is where a restore found it."""

    def __init__(self, written: Callable[[StateFile], object] = lambda file: None) -> None:
        self._written, self.path = written, Path()

    def write(self, file: StateFile) -> None:
        self._written(file)

    def load(self, path: Path) -> None:
        self.path = path


def export(run: Path, target: Path, to: str, *, which: str = "latest") -> Path:
    """Writes a run's checkpoint (`which`: "latest" or "best") into a new directory; returns that checkpoint's path.
    Raises `CheckpointError` if none is whole, or it is not one of PyTorch; `ConfigError` if the directory is not
    empty, or parameters of the optimizer have no name."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("an export needs a directory of its own", f"{target} exists", "give a new directory")
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    if (run / "manifest.json").exists():
        folder, which = run.parent, str(run)
    found = _File()
    if Checkpointer(folder, world=World.solo(), asynchronous=False).restore({MODEL: found}, which=which) is None:
        raise CheckpointError("an export needs a checkpoint", f"none in {folder}", "give a run that has saved one")
    state = _state_of(found.path.parent) if to == "torch" else {}
    target.mkdir(parents=True, exist_ok=True)
    if to == "torch":
        with StateFile.on_disk(target / "checkpoint.pt") as file:
            write(state, file, "the checkpoint")
    else:
        shutil.copyfile(found.path, target / MODEL)
    return found.path.parent


def _state_of(path: Path) -> dict[str, Any]:
    manifest = read_manifest(path)
    state: dict[str, Any] = {"model": _weights_of(path / MODEL)}
    names = {*manifest["files"]} - {MODEL, TRAINING}
    rest = {"files": {name: _bytes((path / name).read_bytes()) for name in names}}
    rest |= {name: manifest[name] for name in ("progress", "metrics")}
    if TRAINING in manifest["files"]:
        training = rest["training"] = read(path / TRAINING)
        optimizer, training["optimizer"] = revived(training["optimizer"], np.generic.item), None
        state["optim"] = _renamed(optimizer, [name for name, *_ in training.get("parameters", ())])
        order = [name for group in state["optim"]["param_groups"] for name in group["params"]]
        if not all(order):
            raise ConfigError(
                "each parameter of the optimizer needs a name in the model",
                f"{order.count('')} of {len(order)} have none",
                "save again, with the model's own parameters in the optimizer;\n"
                "or export the weights only: --to safetensors",
            )
    torch.save(rest, packed := io.BytesIO())
    return {**state, OURS: _bytes(packed.getvalue())}


def _weights_of(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file, also by the other names that its header has."""
    with safe_open(path, framework="pt") as file:
        weights = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (it is no dict)
        others = {other: name for other, name in (file.metadata() or {}).items() if other not in weights}
    return weights | {other: weights[name] for other, name in others.items() if name in weights and other != "format"}


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _renamed(optimizer: Mapping[str, Any], names: Iterable[Any]) -> dict[str, Any]:
    """Returns an optimizer's state with new names for its parameters, in their order; "" when the names run out."""
    groups = optimizer["param_groups"]
    order = (str(key) for group in groups for key in group["params"])  # DCP makes text of the keys in the state
    name_of = dict(zip(order, chain(names, repeat("")), strict=False))
    return {
        **optimizer,
        "state": {name_of.get(str(key), key): value for key, value in optimizer.get("state", {}).items()},
        "param_groups": [group | {"params": [name_of[str(key)] for key in group["params"]]} for group in groups],
    }


def import_(source: Path, run: Path, *, optimizer_class: str | None = None, progress: Mapping[str, int]) -> Path:
    """Makes a checkpoint of `run` from a PyTorch file or from safetensors; returns its path. Raises
    `CheckpointError` if the source cannot be read without running code, `ConfigError` for no model, or a missing
    class of the optimizer."""
    state = _read(source)
    ours = _one_of(state, OURS)
    weights = _one_of(state, "model", "model_state_dict", "state_dict") or state
    if not weights or not all(isinstance(value, Tensor) for value in weights.values()):
        has = ", ".join(map(str, weights)) or "no tensors"
        raise ConfigError("a model's state must be tensors by name", f"{source} has {has:.200}", _REMEDY)
    for prefix in () if ours else 2 * _PREFIXES:
        if all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    tensors, shared = once_each(weights)
    parts: dict[str, Part] = {MODEL: _File(partial(write_tensors, tensors, {"format": "pt", **shared}))}
    place = {**ours.get("progress", {}), **progress}
    optimizer = _one_of(state, "optim", "optimizer", "optimizer_state_dict")
    if optimizer:
        training = _training_of(optimizer, weights, ours.get("training", _UNKNOWN), optimizer_class)
        states = training["optimizer"]["state"].values()
        steps = (int(its["step"]) for its in states if isinstance(its, dict) and "step" in its)
        place = {"step": max(steps, default=0), **place}
        training["progress"] = asdict(Progress(**place))
        parts[TRAINING] = _File(partial(write, training, what="training state"))
    for name, data in ours.get("files", {}).items():
        parts[name] = _File(partial(StateFile.write, data=data.numpy()))
    checkpoints = Checkpointer(run / "checkpoints", world=World.solo(), asynchronous=False, keep=sys.maxsize)
    return checkpoints.save(parts, progress=Progress(**place), metrics=ours.get("metrics"))


def _read(source: Path) -> dict[str, Any]:
    try:
        if source.is_dir() or source.suffix == ".safetensors":
            files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
            return {name: tensor for path in files for name, tensor in _weights_of(path).items()}
        found = read(source)
        state: dict[str, Any] = found if isinstance(found, dict) else {}
        if isinstance(packed := state.get(OURS), Tensor):
            state[OURS] = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
        return state
    except Exception as error:  # whatever a damaged file makes of itself
        reason = str(error).rpartition("WeightsUnpickler error: ")[2]
        raise CheckpointError("a file must load without running code", f"{source}: {reason}", _REMEDY) from error


def _one_of(state: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return next((state[name] for name in names if isinstance(state.get(name), dict)), {})


def _training_of(
    optimizer: Mapping[str, Any], weights: Mapping[str, Tensor], known: Mapping[str, Any], optimizer_class: str | None
) -> dict[str, Any]:
    kind = optimizer_class or known.get("optimizer_class")
    if kind is None:
        raise ConfigError("an import needs the optimizer's class", "the state of one without it", "--optimizer AdamW")
    if not isinstance(optimizer.get("param_groups"), list):
        has = ", ".join(map(str, optimizer))
        raise ConfigError("an optimizer's state must have param_groups", f"it has {has:.200}", _REMEDY)
    training = {**known, "optimizer_class": kind, "optimizer": _renamed(optimizer, count())}
    order = [name for group in optimizer["param_groups"] for name in group["params"]]
    if all(name in weights for name in order):  # else they are numbers
        training["parameters"] = [[name, [*weights[name].shape], str(weights[name].dtype)] for name in order]
    return training
