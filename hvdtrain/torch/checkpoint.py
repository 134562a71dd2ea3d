"""The parts of a checkpoint: the same files on every engine. None of them can run code when it is loaded.

`model.safetensors` is the plain module: `safetensors.torch.load_model(module, path)` opens it anywhere. `training.pt`
holds what an exact resume also needs: the optimizer's state, the gradient scaler, the place in the data, and every
rank's random state. `extra.pt` holds the user's objects. Both are read with `torch.load(weights_only=True)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hvdtrain.checkpoint.parts import Part, Progress, Saver
from hvdtrain.checkpoint.staging import StateFile
from hvdtrain.core.errors import CheckpointError, ConfigError
from hvdtrain.torch.engines import buffers, replicas
from hvdtrain.torch.engines.shell import unwrap
from hvdtrain.torch.plain_files import TorchExtra, read, revived, write, write_tensors
from hvdtrain.torch.update import nonfinite, start
from hvdtrain.torch.update.optimizer import Optimizer
from hvdtrain.torch.update.session import Session
from hvdtrain.torch.update.several import kind_of
from hvdtrain.torch.values.clock import CLOCK
from hvdtrain.values.generators import restore_streams
from hvdtrain.world.world import World, current

if TYPE_CHECKING:
    from hvdtrain.torch.data.loader import Loader

Described = list[Any]  # of a parameter: name, shape, type


def model_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    data: Loader | None = None,
    *,
    extra: MutableMapping[str, Any] | None = None,
    world: World | None = None,
) -> Mapping[str, Part]:
    """Returns the parts of a checkpoint, for `Checkpointer.save` and `restore`.

    `save` takes the current state on every rank. It makes the ranks' buffers equal, gathers random states, and refuses
    weights that are not finite (`NonFiniteError`). `restore` then goes back to an earlier checkpoint.

    Example:
        state = hvt.model_state(model, optimizer, extra={"scheduler": scheduler})
        checkpoints.save(state, progress=optimizer.progress)

    Args:
        model: prepared, or plain (to load weights for use).
        optimizer: as `prepare` returned it; without it only the model is a part.
        data: the training loader, whose place is saved and restored; default: the loader that `prepare` was given. The
            places of other loaders are saved with it, after their last batch, and restored if they exist by then.
        extra: your own objects, as rank 0 has them, by name: with `state_dict` and `load_state_dict` (a scheduler,
            averaged weights), or numbers, text, tensors, arrays, and dicts and lists of those. A restore loads objects,
            tensors and arrays in place and puts other values into this dict.
        world: the ranks; default: those of the optimizer, or of `hvdtrain.init`, or one process.

    Returns:
        `{"model.safetensors": ...}`, with an optimizer `"training.pt"`, with extra `"extra.pt"`.

    Raises:
        ConfigError: the optimizer was not prepared, or not with this loader. While saving: an update is complete but
            not applied, or an object cannot be saved safely; the message names it.
    """
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ConfigError(
            "model_state() needs the optimizer that prepare() returned",
            f"a plain {type(optimizer).__name__}",
            "model, optimizer = prepare(model, optimizer, ...); model_state(model, optimizer)",
        )
    ranks = world or (current() or World.solo() if optimizer is None else optimizer.session.world)
    parts: dict[str, Part] = {"model.safetensors": ModelPart(model, ranks)}
    if optimizer is not None:
        parts = {"training.pt": TrainingPart(optimizer, _loader_of(optimizer, data), extra or {}), **parts}
    return parts if extra is None else {**parts, "extra.pt": TorchExtra(extra)}


def _loader_of(optimizer: Optimizer, data: Loader | None) -> Loader | None:
    """Returns the loader whose place is known exactly: the one that was given to `prepare`."""
    own = optimizer.session.batches.data
    if data is not None and data is not own:
        raise ConfigError(
            "data= must be the loader that prepare() was given",
            "another loader" if own is not None else "prepare() was given no loader",
            "prepare(model, optimizer, train), then model_state(model, optimizer)",
        )
    return own


class ModelPart(Part):
    """The parameters and persistent buffers of a plain module. A tensor of several names is stored once, and the other
    names in the file's metadata (`safetensors.torch.save_model`)."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self.model = model
        self.module = unwrap(model)
        self.world = world
        self._read: dict[str, Tensor] = {}

    @property
    def trained(self) -> object:
        return self.module

    def again(self) -> Callable[[], Part]:
        module, world = self.module, self.world  # and not what it may be wrapped in, which knows the training
        return lambda: ModelPart(module, world)

    def collect(self) -> None:
        CLOCK.enter("checkpoint")
        replicas.check_equal(self.module, self.world, "when the model is saved")
        buffers.synchronize(self.model, self.world)
        nonfinite.check_weights(self.module, self.world)

    def write(self, file: StateFile) -> None:
        tensors, shared = once_each(self.module.state_dict())
        write_tensors({name: tensor.detach() for name, tensor in tensors.items()}, {"format": "pt", **shared}, file)

    def check(self, path: Path) -> None:
        """Reads the file; raises `CheckpointError` with the first tensor that does not fit, and both shapes."""
        CLOCK.enter("checkpoint")
        try:
            with safe_open(path, framework="pt") as file:
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        except SafetensorError as error:
            raise CheckpointError(
                "the model's file must be in the safetensors format", f"{path.name}: {error}"
            ) from error
        own, shared = once_each(self.module.state_dict())
        for other, name in shared.items():
            _check_tied(name, other, stored)
        self._read = {shared.get(name, name): tensor for name, tensor in stored.items()}
        _check_fits(own, self._read)

    def load(self, path: Path) -> None:
        """Puts what was read into the module as it stands."""
        CLOCK.enter("checkpoint")
        own, _ = once_each(self.module.state_dict())
        stored, self._read = self._read, {}
        for name, tensor in own.items():  # what is expanded takes no values: it may have them
            if 0 in tensor.stride() and torch.equal(tensor.cpu(), stored[name]):
                del stored[name]
        with torch.no_grad():
            self.module.load_state_dict(stored, strict=False)  # every name was checked; what shares a tensor has it


def once_each(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Splits a state dict into one name for each tensor, and {other name: that name}."""
    kept: dict[tuple[Any, ...], str] = {}
    shared: dict[str, str] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                "values of the model's state dict must be tensors",
                f"{name} is a {type(tensor).__name__}",
                "make it a buffer (register_buffer), or remove it from the state dict",
            )
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype is torch.complex128:
            raise ConfigError(
                "a safetensors file cannot store sparse, quantized or complex128 tensors",
                f"{name} is {tensor.layout}, {tensor.dtype}",
                "register_buffer(..., persistent=False) and save it with extra=;\n"
                "make complex128 parameters real, and use torch.view_as_complex",
            )
        form = (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
        place = (tensor.device, tensor.data_ptr(), *form)
        first = kept.setdefault(place, name) if tensor.numel() else name
        if first != name:
            shared[name] = first
    return {name: state[name] for name in state if name not in shared}, shared


def _check_tied(name: str, other: str, stored: Mapping[str, Tensor]) -> None:
    if name in stored and other in stored and not torch.equal(stored[name], stored[other]):
        raise CheckpointError(
            "the checkpoint must be of this model",
            f"{name} and {other} are one tensor in the model, and two different tensors in the checkpoint",
            "build the same model as the run that saved the checkpoint (tied weights, or not)",
        )


def _check_fits(own: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    for name, tensor in own.items():
        if name in stored and stored[name].shape != tensor.shape:
            saved, here = tuple(stored[name].shape), tuple(tensor.shape)
            classes = f" ({saved[0]} outputs there, {here[0]} here)" if saved[1:] == here[1:] else ""
            raise CheckpointError(
                "the checkpoint must be of this model",
                f"{name} has shape {saved} in the checkpoint, {here} in the model{classes}",
                "build the same model as the run that saved the checkpoint;\n"
                "or give this training another directory: Checkpointer(...)",
            )
    missing, strange = sorted(own.keys() - stored.keys()), sorted(stored.keys() - own.keys())
    if missing or strange:
        raise CheckpointError(
            "the checkpoint must be of this model",
            f"the checkpoint lacks {_some(missing)}; the model lacks {_some(strange)}",
            "build the same model as the run that saved the checkpoint;\n"
            "or give this training another directory: Checkpointer(...)",
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "nothing"


class TrainingPart(Part):
    """Everything but the model that a run needs to resume."""

    def __init__(self, optimizer: Optimizer, data: Loader | None, extra: Mapping[str, Any] | None = None) -> None:
        self.optimizer = optimizer
        self.data = data
        self._extra = extra or {}
        self.streams: list[dict[str, Any]] = []
        self.others: list[list[dict[str, Any]]] = []  # of each rank: one without a sample in the tail may be ahead
        self._gathered: dict[str, Any] | None = None  # the optimizer's state, where ranks have parts of it
        self._read: dict[str, Any] = {}

    @property
    def progress(self) -> Progress:
        return self.optimizer.progress

    def again(self) -> Callable[[], Part]:
        of, data, extra = ref(self.optimizer), self.data, self._extra

        def made() -> Part:
            optimizer = of()
            assert optimizer is not None  # a training is under way
            return TrainingPart(optimizer, data, extra)

        return made

    def saved_by(self, saver: Saver) -> None:
        self.optimizer.session.saver = saver

    def collect(self) -> None:
        """Gathers the ranks' random states, and their parts of the optimizer's. Raises `ConfigError` if an update is
        complete but not applied, or is gathered while another model is past its batches; `NonFiniteError` if the
        loss of an update since the last check was not finite."""
        CLOCK.enter("checkpoint")
        session = self.optimizer.session
        if session.gradients.state in ("ready", "more"):
            received = "an update is complete but not applied"
            if session.gradients.state == "more":
                received = "backward(..., more=True) announced another backward()"
            raise ConfigError("a checkpoint cannot be saved between backward() and step()", received, "step() first")
        session.batches.saved(session.gradients.batch if session.gradients.gathering else None)
        session.losses.settle()
        others = [] if self.data is None else self.data.others(self._extra.values())
        ranks = session.world.gather((session.streams(), [other.state_dict() for other in others]))
        self.streams, self.others = map(list, zip(*ranks, strict=True))
        if session.zero is not None:
            self._gathered = session.zero.state_dict(keep=session.world.is_main)

    def write(self, file: StateFile) -> None:
        optimizer = self.optimizer
        content = {
            "format": 1,
            "optimizer": optimizer.state_dict() if self._gathered is None else self._gathered,
            "optimizer_class": kind_of(optimizer.wrapped),
            "precision": optimizer.session.precision.state_dict(),
            "progress": asdict(optimizer.progress),
            "loader": _place(optimizer.session),
            "others": self.others,
            "loop_goes_on": self.data is not None and self.data.loop_goes_on(),
            "parameters": _described(optimizer),
            "streams": self.streams,
        }
        write(content, file, "training state")
        self._gathered = None  # not before: what memory has no room for is written again, to disk

    def check(self, path: Path) -> None:
        """Reads the file; raises `CheckpointError` if it is of another optimizer."""
        saved = self._read = revived(read(path), np.generic.item)
        _check_optimizer(saved, _described(self.optimizer), self.optimizer.wrapped)

    def load(self, path: Path) -> None:
        """Resumes as saved; with own random streams at another size. Raises `CheckpointError` for other data."""
        saved, self._read = self._read, {}
        session, own = self.optimizer.session, _described(self.optimizer)
        self.optimizer.wrapped.load_state_dict(saved["optimizer"])
        _keep_precision(saved, own, self.optimizer.wrapped)
        self.optimizer.loaded()
        session.precision.load_state_dict(saved["precision"])
        session.gradients.restart()
        session.losses.forget()
        session.batches.restart()
        self.optimizer.progress = Progress(**saved["progress"])
        if self.data is not None and saved["loader"] is not None:
            try:
                self.data.load_state_dict(saved["loader"])
            except ConfigError as error:
                raise CheckpointError(error.rule, error.received, error.remedy) from error
        world = session.world
        if saved.get("loop_goes_on") and self.data is not None and world.is_main:
            last, now = saved["loader"]["epoch"] - 1, saved["loader"]["epoch"]
            print(
                f"hvdtrain: continues with epoch {now}: the checkpoint was saved after the last batch of epoch {last},"
                " within its loop. What the program does once that loop is over (validation, a scheduler's step) is not"
                " in it, and is not done for that epoch: also save after the loop",
                flush=True,
            )
        same_size = len(saved["streams"]) == world.size
        if self.data is not None and saved.get("others"):
            places = saved["others"][world.rank if same_size else 0]
            put_others(self.data.others(self._extra.values()), places, report=world.is_main)
        if same_size:
            restore_streams(saved["streams"][world.rank], world.devices)
        else:
            start.split_streams(world, "resumed", saved["progress"]["samples_seen"])


def put_others(others: Iterable[Loader], places: Iterable[dict[str, Any]], *, report: bool = False) -> None:
    """Puts loaders that no model was prepared with where they were; of several alike, the newest first."""
    left = list(places)
    for other in others:
        found = next((index for index, place in enumerate(left) if not other.differs(place)), None)
        if found is not None:
            other.load_state_dict(left.pop(found))
    for place in left:
        epoch, done = place["epoch"], place["samples_in_epoch"]
        if report and (done or epoch > 1 and place["shuffle"]):  # 1: a look at a batch, by a loader that is gone
            print(
                f"hvdtrain: the checkpoint has the place of a second loader, of {place['samples']} samples (epoch"
                f" {epoch}, {done} samples done), and no loader of the same data and seed exists yet that could"
                " continue there: one that is made later begins with its first epoch; make it before the restore",
                flush=True,
            )


def _place(session: Session) -> dict[str, Any] | None:
    """Returns where the loader continues: after the last batch that is in the weights."""
    data = session.batches.data
    if data is None:
        return None
    left = data.left_early()  # reported once
    if left is not None and session.world.is_main:
        whole = data.plan.samples or "its"  # a stream's
        print(
            f"hvdtrain: epoch {left[0]} ended after {left[1]} of {whole} samples: a run restored from"
            f" this checkpoint begins epoch {left[0] + 1}, as this one would (to continue there, save within the loop)",
            flush=True,
        )
    return session.batches.state()


def _check_optimizer(saved: Mapping[str, Any], own: list[Described], optimizer: torch.optim.Optimizer) -> None:
    kind = kind_of(optimizer)
    if saved["optimizer_class"] != kind:
        raise CheckpointError(
            "the optimizer must be of the class that the checkpoint was saved with",
            f"{saved['optimizer_class']} in the checkpoint, {kind} here",
            "make the same optimizer, or start a new run from the checkpoint's model alone: model_state(model)",
        )
    stored = [len(group["params"]) for group in saved["optimizer"]["param_groups"]]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if stored != here:
        raise CheckpointError(
            "the optimizer must have the same groups as in the checkpoint",
            f"groups of {stored} parameters in the checkpoint, {here} here",
            "build the same model and parameter groups as the run that saved the checkpoint",
        )
    for (name, shape, _), (name_here, shape_here, _) in zip(saved.get("parameters", ()), own, strict=False):
        if list(shape) != shape_here or name and name_here and name != name_here:
            raise CheckpointError(
                "the optimizer's state must fit the model",
                f"{name} {tuple(shape)} in the checkpoint, where {name_here} {tuple(shape_here)} is here",
                "build the same model and parameter groups as the run that saved the checkpoint, in the same order",
            )


def _described(optimizer: Optimizer) -> list[Described]:
    """Name, shape and type of each parameter, in the optimizer's order."""
    names = {id(parameter): name for name, parameter in optimizer.session.module.named_parameters()}
    parameters = [parameter for group in optimizer.wrapped.param_groups for parameter in group["params"]]
    return [[names.get(id(p), ""), list(p.shape), str(p.dtype)] for p in parameters]


def _keep_precision(saved: Mapping[str, Any], own: list[Described], optimizer: torch.optim.Optimizer) -> None:
    """Restores masters and moments that are wider than their parameter, to whose dtype PyTorch casts them."""
    order = [index for group in saved["optimizer"]["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter, before, now in zip(order, parameters, saved.get("parameters", ()), own, strict=False):
        if before[2] == now[2] and index in saved["optimizer"]["state"]:
            loaded = optimizer.state[parameter]
            loaded.update(_uncast(saved["optimizer"]["state"][index], loaded))


def _uncast(saved: Any, loaded: Any) -> Any:
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        return loaded if saved.dtype == loaded.dtype else saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {key: _uncast(saved[key], value) if key in saved else value for key, value in loaded.items()}
    if isinstance(saved, (list, tuple)) and type(saved) is type(loaded) and len(saved) == len(loaded):
        return type(saved)(map(_uncast, saved, loaded))
    return loaded
