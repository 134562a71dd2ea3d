"""What an engine binds: the user's module in a thin shell, through which known gradients can be sent as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor, nn

from hvdtrain.torch.engines.base import staged_or_none


class Probe:
    """Given to the shell in place of data: the forward pass is a sum over the parameters, whose gradients are
    `factor` times `pattern(i, parameter)`, with i in the order of `parameters()`."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module) -> Tensor:
        """Returns a float32 (or wider) scalar that depends on every trainable parameter."""
        total: Tensor | None = None
        for index, parameter in enumerate(trainable(module)):
            term = (parameter * pattern(index, parameter)).sum()
            term = term.real if term.is_complex() else term
            term = term if term.dtype in (torch.float32, torch.float64) else term.float()
            total = term if total is None else total + term.to(total.device)  # stages have devices of their own
        assert total is not None
        return total * self.factor


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that get gradients, each once."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def trains_others(module: nn.Module, known: Sequence[nn.Parameter]) -> bool:
    """Returns True if other parameters are trainable than those known: layers were frozen, or thawed."""
    return any(now is not before for now, before in zip_longest(trainable(module), known))


LARGEST = 0.875  # value in a pattern


def pattern(index: int, parameter: Tensor) -> Tensor:
    """Values with few significant bits, so that sums over ranks are exact, different from one place to the next."""
    places = torch.arange(parameter.numel(), device=parameter.device)
    eight = ((places * 5 + index) % 8 - 3.5) / 4.0  # in -LARGEST .. LARGEST, never 0
    return eight.to(parameter.dtype).view(parameter.shape)


class ModelShell(nn.Module):
    """The shell that the engine binds and calls like any module. Data goes through `call`, compiled or not."""

    def __init__(self, module: nn.Module, call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.module = module
        object.__setattr__(self, "_call", call)  # not a submodule: its parameters are the module's

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Probe):
            return args[0](self.module)
        call = vars(self)["_call"]
        return (self.module if call is None else call)(*args, **kwargs)  # `or` would ask a module for its length


def is_compiled(module: object) -> bool:
    """Returns True if `torch.compile` made it from a module; by name, because importing its class takes seconds."""
    return type(module).__name__ == "OptimizedModule"


def unwrap(model: nn.Module) -> nn.Module:
    """Returns the plain module of a prepared model or of a pipeline; returns any other module as it is.

    Example:
        world.on_main(torch.save, hvt.unwrap(model).state_dict(), "model.pt")
    """
    if getattr(type(model), "holds_users_module", False):
        model = vars(model)["module"]
    if is_compiled(model):
        model = cast(nn.Module, model._orig_mod)
    staged = staged_or_none(model)
    return model if staged is None else staged.module
