"""A model that is looked at ends as it was."""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hvdtrain.core.generators import State
from hvdtrain.values.generators import HOST, differ, of_devices
from hvdtrain.values.preserved import kept_buffers, kept_modes


@contextmanager
def all_training(model: nn.Module, training: bool | None) -> Iterator[None]:
    """Every module in this mode (None: as it is), without calling `train()`, which models override; then as it was."""
    with kept_modes(model.modules()):
        for module in model.modules():
            module.training = module.training if training is None else training
        yield


_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)
_TORCHS = frozenset(nn.Module().__dict__)
# of each module its attributes, and what was in those that are containers
Attributes = dict[nn.Module, tuple[dict[str, Any], dict[str, Any]]]


def attributes_of(model: nn.Module) -> Attributes:
    """What each module holds, to be `restored`."""
    return {
        module: (
            dict(module.__dict__),
            {
                name: copy.copy(value)
                for name, value in module.__dict__.items()
                if type(value) in _CONTAINERS and name not in _TORCHS
            },
        )
        for module in model.modules()
    }


def changes(before: Attributes) -> Iterator[tuple[nn.Module, str, Any]]:
    """What was set on modules since, or put into their containers: module, name, and the value now."""
    for module, (was, contents) in before.items():
        for name, value in module.__dict__.items():
            filled = name in contents and not holds(value, contents[name])
            if name != "training" and (value is not was.get(name) or filled):
                yield module, name, value


def copied(value: Any) -> Any:
    """A container of its own, with the same objects."""
    return copy.copy(value) if type(value) in _CONTAINERS else value


def restored(before: Attributes) -> tuple[nn.Module, str] | None:
    """Undoes what was set on modules since; returns the last of them, and the attribute."""
    found = None
    for module, (was, contents) in before.items():
        now = module.__dict__
        changed = [name for name in {*was, *now} if name != "training" and now.get(name) is not was.get(name)]
        if changed:
            training = module.training
            now.clear()
            now.update(was, training=training)
            found = (module, changed[0])
        for name, content in contents.items():
            if not holds(was[name], content):
                _refill(was[name], content)
                found = (module, name)
    return found


def redrawn(before: State) -> bool:
    """Puts the host's generators back; returns whether anything had been drawn."""
    drawn = differ(before, HOST.everything())
    if drawn:
        HOST.restore(before)
    return drawn


def holds(container: Any, content: Any) -> bool:
    """The same objects."""
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        return all(key in container and container[key] is value for key, value in content.items())
    if isinstance(container, set):
        return container == content
    return all(a is b for a, b in zip(container, content, strict=True))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if hasattr(container, "extend") else container.update)(content)


@contextmanager
def preserved_state(model: nn.Module, *devices: torch.device) -> Iterator[None]:
    """Whatever runs inside: buffers, modules' attributes, gradients and random state end as they were."""
    attributes = attributes_of(model)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    with of_devices(*devices).preserved(), kept_buffers(model.modules()):
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            restored(attributes)
            for parameter, gradient in gradients:
                parameter.grad = gradient
