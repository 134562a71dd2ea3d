"""Watches the steps of optimizers that `prepare` has not returned: with them each rank trains alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from hvdtrain.core.errors import ConfigError
from hvdtrain.world.world import current

PREPARE = "model, optimizer = hvdtrain.torch.prepare(model, optimizer, train)"
reported = set[str]()  # classes of optimizers
_trained = WeakTensorKeyDictionary()  # parameters of prepared models
_reached = WeakTensorKeyDictionary()  # parameters of no prepared model that a loss would put gradients into
_given: WeakSet[Optimizer] = WeakSet()  # the plain optimizers that prepare() was given
_watching = _reports = _engine_steps = False


def watch(*, reports: bool = True) -> None:
    """Looks at the steps of all optimizers from now on; `reports`: also at those that no prepared model is near."""
    global _watching, _reports
    _reports = reports
    if not _watching:
        register_optimizer_step_pre_hook(_check_step)
        _watching = True


def stop() -> None:
    """Reports no more optimizers: their gradients are averaged elsewhere."""
    global _reports
    _reports = False


def prepared(parameters: Iterable[nn.Parameter], optimizers: Iterable[Optimizer]) -> None:
    """Notes that the optimizer that `prepare` returns trains these parameters, by these plain optimizers."""
    for optimizer in optimizers:
        _given.add(optimizer)
        vars(optimizer)["backward"] = partial(_refuse, "backward", type(optimizer).__name__)
    for parameter in parameters:
        _trained[parameter] = True


def closed(parameters: Iterable[nn.Parameter], optimizers: Iterable[Optimizer], *, used: bool) -> None:
    """Notes that the prepared optimizer is gone; a plain one stays refused if it was never `used`."""
    for optimizer in optimizers if used else ():
        _given.discard(optimizer)
        vars(optimizer).pop("backward", None)
    for parameter in parameters:
        _trained.pop(parameter, None)


def note_reached(leaves: Iterable[Tensor]) -> None:
    """Has optimizers refused that are not prepared, and would update parameters that a loss reaches."""
    for leaf in leaves:
        if isinstance(leaf, nn.Parameter) and leaf not in _trained:
            _reached[leaf] = True


@contextmanager
def engine_steps() -> Iterator[None]:
    """Allows the plain optimizers to step while the context is open."""
    global _engine_steps
    _engine_steps = True
    try:
        yield
    finally:
        _engine_steps = False


def _refuse(call: str, kind: str, *_: object, **__: object) -> NoReturn:
    raise ConfigError(
        f"{call}() must be called on the optimizer that prepare() returned",
        f"{call}() of the {kind} that was given to prepare()",
        f"model, optimizer = prepare(model, optimizer, ...), then {call}() of the returned optimizer",
        code=34,
    )


def _check_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    world, kind = current(), type(optimizer).__name__
    if world is None or world.size == 1 or _engine_steps:
        return
    if optimizer in _given:
        _refuse("step", kind)
    held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None and p not in _trained]
    reached = [tuple(parameter.shape) for parameter in held if parameter in _reached]
    if len(_trained) and reached:
        raise ConfigError(
            "all parameters that a loss trains must belong to the prepared model",
            f"{kind}.step() of an optimizer without prepare():\nthe loss reaches {len(reached)} of its parameters,"
            f" of shapes {', '.join(map(str, reached[:3]))}",
            "make them a part of the model (an attribute, or one torch.nn.ModuleDict of both), with one optimizer\n"
            'whose groups have separate rates: SGD([{"params": ..., "lr": ...}, ...]), and prepare() these',
            shared=True,
        )
    averages = hasattr(optimizer, "synchronize")  # Horovod's own
    if held and _reports and not averages and kind not in reported:
        reported.add(kind)
        if world.is_main:
            print(
                f"hvdtrain: {kind}.step() on {world.size} ranks of an optimizer that is not prepared: hvdtrain averages"
                f" nothing, and each rank trains its own copy of the parameters\n  fix: {PREPARE}",
                flush=True,
            )
