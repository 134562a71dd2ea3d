"""The parts of a checkpoint: the same two files on every engine, neither of which can run code when it is loaded.

`model.safetensors` is the user's plain module: ``safetensors.torch.load_model(module, path)`` opens it anywhere.
`training.pt` is what else a run needs to go on exactly: the optimizer's state, the gradient scaler, the place in the
data, and every rank's random numbers; it is read with ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hvdtrain.checkpoint import Part, Progress
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.torch import _buffers, _start
from hvdtrain.torch._clock import CLOCK
from hvdtrain.torch._inner import unwrap
from hvdtrain.torch._optimizer import Optimizer
from hvdtrain.torch._session import Session
from hvdtrain.world import World, current

if TYPE_CHECKING:
    from hvdtrain.torch._loader import Loader

_PLAIN = (bool, int, float, str, type(None), Tensor)


def model_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    data: Loader | None = None,
    *,
    world: World | None = None,
) -> Mapping[str, Part]:
    """Returns what a checkpoint consists of, for `Checkpointer.save` and `restore`; collective.

    Call it on every rank, right before the save or the restore: it makes the ranks' buffers equal (as the checkpoint
    will have them) and gathers their random states.

    Args:
        model: prepared, or plain (to load weights for use).
        optimizer: as `prepare` returned it; without it only the model is a part.
        data: the training loader; a restore puts it where the saved run was.
        world: the ranks; by default those of the optimizer, or of `hvdtrain.init`, or one process.

    Returns:
        ``{"model.safetensors": ...}``, and with an optimizer ``"training.pt"``.

    Raises:
        ConfigError: the optimizer was not prepared, an update is complete but not applied, or the optimizer holds
            something that cannot be saved safely.
        NonFiniteError: the loss of an update since the last check was not finite.
    """
    CLOCK.enter("checkpoint")
    parts: dict[str, Part] = {"model.safetensors": ModelPart(unwrap(model))}
    if optimizer is None:
        _buffers.synchronize(model, world or current() or World.solo())
        return parts
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            "a checkpoint of training holds the optimizer that prepare() returned",
            f"a plain {type(optimizer).__name__}",
            "model, optimizer = prepare(model, optimizer, ...); model_state(model, optimizer, data)",
        )
    session = optimizer.session
    if session.gradients.state == "ready":
        raise ConfigError("a checkpoint is taken after step()", "an update is complete and not applied", "step() first")
    session.losses.settle()
    _buffers.synchronize(model, session.world)
    streams = session.world.gather(_streams(session.world.devices))
    return {**parts, "training.pt": TrainingPart(optimizer, data, streams)}


class ModelPart:
    """Parameters and persistent buffers of a plain module.

    Names that share a tensor are stored once; the others' names are in the file's metadata, as
    `safetensors.torch.save_model` writes them.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def save(self, path: Path) -> None:
        tensors, shared = _once_each(self.module.state_dict())
        on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(on_host, path, metadata={"format": "pt", **shared})

    def load(self, path: Path) -> None:
        """Reads the file into the module as it stands.

        Raises:
            CheckpointError: it is of another model; the first tensor that does not fit is named, with both shapes.
        """
        try:
            with safe_open(path, framework="pt") as file:
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        except SafetensorError as error:
            raise CheckpointError(
                "the model's file must be in the safetensors format", f"{path.name}: {error}"
            ) from error
        own, shared = _once_each(self.module.state_dict())
        stored = {shared.get(name, name): tensor for name, tensor in stored.items()}
        _check_fits(own, stored)
        with torch.no_grad():
            self.module.load_state_dict(stored, strict=False)  # every name was checked; what shares a tensor has it


def _once_each(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Splits a state dict into one name for each tensor, and {other name: that name}."""
    kept: dict[tuple[Any, ...], str] = {}
    shared: dict[str, str] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                "a checkpoint of a model holds tensors", f"{name} is a {type(tensor).__name__}",
                "make it a buffer (register_buffer), or keep it out of the state dict",
            )  # fmt: skip
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        first = kept.setdefault(place, name) if tensor.numel() else name
        if first != name:
            shared[name] = first
    return {name: state[name] for name in state if name not in shared}, shared


def _check_fits(own: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    for name, tensor in own.items():
        if name in stored and stored[name].shape != tensor.shape:
            saved, here = tuple(stored[name].shape), tuple(tensor.shape)
            classes = f" ({saved[0]} classes there, {here[0]} here?)" if saved[1:] == here[1:] else ""
            raise CheckpointError(
                "the checkpoint must be of this model",
                f"{name} has shape {saved} in the checkpoint, {here} in the model{classes}",
                "build the model as the run did that saved it (same architecture, same number of classes)",
            )
    missing, strange = sorted(own.keys() - stored.keys()), sorted(stored.keys() - own.keys())
    if missing or strange:
        raise CheckpointError(
            "the checkpoint must be of this model",
            f"the checkpoint lacks {_some(missing)}; the model lacks {_some(strange)}",
            "build the model as the run did that saved it",
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "nothing"


class TrainingPart:
    """Everything but the model that a run needs to go on."""

    def __init__(self, optimizer: Optimizer, data: Loader | None, streams: list[dict[str, Any]]) -> None:
        self.optimizer = optimizer
        self.data = data
        self.streams = streams
        self.content = {
            "format": 1,
            "optimizer": optimizer.state_dict(),
            "optimizer_class": type(optimizer.wrapped).__name__,
            "precision": optimizer.session.precision.state_dict(),
            "progress": asdict(optimizer.progress),
            "loader": None if data is None else {**data.state_dict(), **_place(optimizer)},
            "streams": streams,
        }
        _check_plain(self.content, "training state")

    def save(self, path: Path) -> None:
        torch.save(self.content, path)

    def load(self, path: Path) -> None:
        """Takes up where the saved run was; at another world size with random streams of its own.

        Raises:
            CheckpointError: it is of another optimizer, or of another data set.
        """
        saved = torch.load(path, map_location="cpu", weights_only=True)
        session = self.optimizer.session
        _check_optimizer(saved, self.optimizer.wrapped, session)
        self.optimizer.load_state_dict(saved["optimizer"])
        session.precision.load_state_dict(saved["precision"])
        session.gradients.restart()
        self.optimizer.progress = Progress(**saved["progress"])
        if self.data is not None and saved["loader"] is not None:
            try:
                self.data.load_state_dict(saved["loader"])
            except ConfigError as error:
                raise CheckpointError(error.rule, error.came, error.remedy) from error
        world = session.world
        if len(saved["streams"]) == world.size:
            _restore_streams(saved["streams"][world.rank], world.devices)
        else:
            _start.split_streams(world, "resumed", saved["progress"]["samples_seen"])


def _place(optimizer: Optimizer) -> dict[str, int]:
    """Where the loader must go on if its last batch was handed out but not trained on; else nothing to correct."""
    batch = optimizer.session.batches.now()
    if batch is None or batch is optimizer.session.gradients.batch or optimizer.progress.step == 0:
        return {}
    return {"epoch": optimizer.progress.epoch, "samples_in_epoch": optimizer.progress.samples_in_epoch}


def _check_optimizer(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, session: Session) -> None:
    kind = type(optimizer).__name__
    if saved["optimizer_class"] != kind:
        raise CheckpointError(
            "a run goes on with the optimizer it began with",
            f"{saved['optimizer_class']} in the checkpoint, {kind} here",
            "make the same optimizer, or start a new run from the checkpoint's model alone: model_state(model)",
        )  # fmt: skip
    stored = [len(group["params"]) for group in saved["optimizer"]["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if stored != own:
        raise CheckpointError(
            "the optimizer must have the groups it was saved with",
            f"groups of {stored} parameters in the checkpoint, {own} here",
            "build model and parameter groups as the run did that saved them",
        )
    names = {id(parameter): name for name, parameter in session.module.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    order = [index for group in saved["optimizer"]["param_groups"] for index in group["params"]]
    for index, parameter in zip(order, parameters, strict=True):
        for key, value in saved["optimizer"]["state"].get(index, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                raise CheckpointError(
                    "the optimizer's state must fit the model",
                    f"{key} of {names[id(parameter)]}: {tuple(value.shape)} in the checkpoint,"
                    f" {tuple(parameter.shape)} in the model",
                    "build model and parameter groups as the run did that saved them, in the same order",
                )


def _check_plain(value: Any, where: str) -> None:
    """Refuses, while saving, what ``weights_only=True`` would refuse when it is too late."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_plain(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif not isinstance(value, _PLAIN):
        raise ConfigError(
            "a checkpoint holds numbers, text and tensors, so that loading it runs no code",
            f"{where} is a {type(value).__name__}",
            "keep such objects out of the optimizer's groups and state",
        )


# -- random numbers -----------------------------------------------------------------------------------------------
def _streams(gpus: Sequence[int]) -> dict[str, Any]:
    """The state of every generator of this rank that a training program may draw from; of all its GPUs."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "more_cuda": [torch.cuda.get_rng_state(gpu) for gpu in gpus[1:]],
        "python": [version, list(words), gauss],
        "numpy": [
            str(kind),
            torch.from_numpy(np.asarray(keys, np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }


def _restore_streams(saved: Mapping[str, Any], gpus: Sequence[int]) -> None:
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
    for gpu, state in zip(gpus[1:], saved.get("more_cuda", ()), strict=False):  # as far as there are as many
        torch.cuda.set_rng_state(state, gpu)
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
