"""What cannot be prepared, refused before anything is moved or sent; and optimizers that train unprepared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from hvdtrain.core.errors import ConfigError
from hvdtrain.torch.losses.loss_graph import leaves_of
from hvdtrain.torch.update.session import prepared_optimizers, session_of
from hvdtrain.world.world import current

# who wraps models and optimizers, by how the name of their class's module begins
_WRAPPERS = {
    "horovod.": "Horovod's DistributedOptimizer",
    "deepspeed.": "DeepSpeed",
    "accelerate.": "Accelerate",
    "lightning.": "Lightning",
    "lightning_fabric.": "Lightning Fabric",
    "hvdtrain.torch.": "hvdtrain",
}


def check_model(model: nn.Module) -> None:
    """Raises `ConfigError` for a model that is wrapped already, has no trainable parameter, or sparse gradients."""
    if not isinstance(model, nn.Module):
        raise ConfigError("prepare() needs a torch.nn.Module", f"model is a {type(model).__name__}")
    parallel = type(model).__module__.startswith(("torch.nn.parallel", "torch.distributed"))
    # the class itself, not what it inherits from: a LightningModule is a model like any other
    wrapper = type(model).__name__ if parallel else _wrapper_of(type(model))
    if wrapper:
        raise ConfigError(
            "prepare() needs the plain model, without a wrapper",
            f"a model wrapped by {wrapper}",
            "call prepare() once; to prepare again: prepare(hvdtrain.torch.unwrap(model), optimizer.wrapped, ...)"
            if wrapper == "hvdtrain"
            else "give prepare() model.module",
            code=18,
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(
                "a model must have all its parameters before prepare()",
                f"{name} has no shape yet (a lazy layer)",
                "run one batch through the model first, with the same seed on every rank",
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ConfigError(
                "gradients must be dense to be summed over ranks",
                f"{name} is {type(module).__name__}(sparse=True)",
                f"nn.{type(module).__name__}(..., sparse=False)",
            )


def check_plain(optimizer: Optimizer) -> None:
    """Raises `ConfigError` for what is no optimizer, or wrapped already."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError("prepare() needs a torch.optim.Optimizer", f"optimizer is a {type(optimizer).__name__}")
    wrapper = next(filter(None, map(_wrapper_of, type(optimizer).__mro__)), "")
    # Horovod makes a class of its own, named and placed like the user's, with these methods
    if wrapper or hasattr(optimizer, "skip_synchronize"):
        raise ConfigError(
            "prepare() needs the plain optimizer, without a wrapper",
            f"an optimizer wrapped by {wrapper or _WRAPPERS['horovod.']}",
            "optimizer.wrapped" if wrapper == "hvdtrain" else "pass the torch.optim optimizer to prepare()",
        )


def check_held(model: nn.Module, held: Sequence[nn.Parameter]) -> None:
    """Raises `ConfigError` for parameters that are not the model's."""
    names = {id(parameter) for parameter in model.parameters()}
    strange = [tuple(parameter.shape) for parameter in held if id(parameter) not in names]
    if strange:
        raise ConfigError(
            "every parameter of the optimizer must be one of the model's",
            f"{len(strange)} of {len(held)} are not, the first of shape {strange[0]}",
            "make the optimizer from this model's parameters(), after the model is complete;\na loss with parameters is"
            " a part of the model: model.criterion = criterion, before prepare()",
            code=19,
        )


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises `ConfigError` unless the optimizer holds exactly the model's trainable parameters."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    check_held(model, held)
    ids = {id(parameter) for parameter in held}
    missing = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in ids]
    if missing:
        raise ConfigError(
            "every trainable parameter of the model must be in the optimizer",
            f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''} ({len(missing)} in all)",
            "add them to a parameter group, or freeze them: parameter.requires_grad_(False)",
            code=20,
        )
    if not any(parameter.requires_grad for parameter in held):
        raise ConfigError("there must be something to train", "every parameter is frozen, or there is none")


def _wrapper_of(kind: type) -> str:
    return next((who for start, who in _WRAPPERS.items() if kind.__module__.startswith(start)), "")


# ---- optimizers that are not prepared

_reached = WeakTensorKeyDictionary()  # parameters of no prepared model that a loss would put gradients into
_watching = False
_reported = set[str]()


def watch_unprepared() -> None:
    """Looks at the steps of optimizers that are not prepared, from now on: each rank would update the parameters that
    they have with its own gradients."""
    global _watching
    if not _watching:
        register_optimizer_step_pre_hook(_check_step)
        _watching = True


def note_reached(loss: Tensor) -> None:
    """Has optimizers refused that are not prepared, and would update parameters that this loss reaches."""
    leaves = [leaf for leaf in leaves_of(loss) if isinstance(leaf, nn.Parameter)]
    prepared = set(map(id, _prepared())) if leaves else set()
    for leaf in leaves:
        if id(leaf) not in prepared:
            _reached[leaf] = True


def _prepared() -> Iterator[nn.Parameter]:
    """Yields parameters that a prepared optimizer trains, until it is closed or deleted."""
    modules = (module for module in list(prepared_optimizers) if session_of(module) is not None)
    return (parameter for module in modules for parameter in module.parameters())


def _check_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    sessions = [session for module in list(prepared_optimizers) if (session := session_of(module)) is not None]
    world = current()
    if world is None or world.size == 1 or any(session.stepping for session in sessions):
        return
    prepared, kind = set(map(id, _prepared())), type(optimizer).__name__
    its = [
        p for group in optimizer.param_groups for p in group["params"] if p.grad is not None and id(p) not in prepared
    ]
    reached = [tuple(parameter.shape) for parameter in its if parameter in _reached]
    if sessions and reached:
        raise ConfigError(
            "all parameters that a loss trains must belong to the prepared model",
            f"{kind}.step() of an optimizer without prepare():\nthe loss reaches {len(reached)} of its parameters,"
            f" of shapes {', '.join(map(str, reached[:3]))}",
            "make them a part of the model (an attribute, or one torch.nn.ModuleDict of both), with one optimizer\n"
            'whose groups have separate rates: SGD([{"params": ..., "lr": ...}, ...]), and prepare() these',
            shared=True,
        )
    averages = hasattr(optimizer, "synchronize")  # Horovod's own
    if its and not averages and kind not in _reported and world.is_main:
        _reported.add(kind)
        print(
            f"hvdtrain: {kind}.step() of an optimizer that is not prepared: each rank trains its own copy of its"
            " parameters\n  fix: model, optimizer = hvdtrain.torch.prepare(model, optimizer, data), with this one",
            flush=True,
        )
