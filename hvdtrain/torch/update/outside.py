"""Parameters that a loss trains and no prepared model has: each rank would update its own with its own gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from hvdtrain.core.errors import ConfigError
from hvdtrain.torch.losses.loss_graph import leaves_of
from hvdtrain.torch.update.session import prepared_optimizers, session_of

_reached = WeakTensorKeyDictionary()  # parameters of no prepared model that a loss would put gradients into
_watching = False
_told = set[str]()


def watch() -> None:
    """Looks at the steps of optimizers that are not prepared, from now on."""
    global _watching
    if not _watching:
        register_optimizer_step_pre_hook(_check)
        _watching = True


def note(loss: Tensor) -> None:
    """Has optimizers refused that are not prepared, and would update parameters that this loss reaches."""
    leaves = [leaf for leaf in leaves_of(loss) if isinstance(leaf, nn.Parameter)]
    prepared = set(map(id, _prepared())) if leaves else set()
    for leaf in leaves:
        if id(leaf) not in prepared:
            _reached[leaf] = True


def _prepared() -> Iterator[nn.Parameter]:
    return (parameter for module in list(prepared_optimizers) for parameter in module.parameters())


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    sessions = [session for module in list(prepared_optimizers) if (session := session_of(module)) is not None]
    if not sessions or any(session.stepping for session in sessions):
        return
    prepared, kind = set(map(id, _prepared())), type(optimizer).__name__
    its = [
        p for group in optimizer.param_groups for p in group["params"] if p.grad is not None and id(p) not in prepared
    ]
    reached = [tuple(parameter.shape) for parameter in its if parameter in _reached]
    if reached:
        raise ConfigError(
            "all parameters that a loss trains must be those of the prepared model: other gradients are not averaged",
            f"{kind}.step() of an optimizer that is not prepared: the loss reaches {len(reached)} of its parameters, of"
            f" shapes {', '.join(map(str, reached[:3]))}",
            "make them a part of the model (an attribute of it, or one torch.nn.ModuleDict of both), with one optimizer"
            ' whose groups have rates of their own: SGD([{"params": ..., "lr": ...}, ...]), and prepare these',
            shared=True,
        )
    if its and kind not in _told and sessions[0].world.is_main:
        _told.add(kind)
        print(
            f"hvdtrain: {kind}.step() of an optimizer that is not prepared: each rank trains its own copy of its"
            f" parameters; hvdtrain.torch.prepare(model, optimizer, data) averages their gradients",
            flush=True,
        )
