"""What cannot be prepared, refused before anything is moved or sent."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from hvdtrain.core.errors import ConfigError

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
