"""Calls a model with a few samples of an example, and leaves it as it was."""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.core.generators import State
from hvdtrain.pipeline.values.microbatch import samples_of, unmarked
from hvdtrain.values.generators import HOST, differ, of_devices
from hvdtrain.values.nested import map_tensors
from hvdtrain.values.preserved import kept_buffers, kept_modes


@contextmanager
def all_training(model: nn.Module, training: bool | None) -> Iterator[None]:
    """Sets every module's mode (None: as it is), without `train()`, which models override; restores it at the end."""
    with kept_modes(model.modules()):
        for module in model.modules():
            module.training = module.training if training is None else training
        yield


_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)
_TORCHS = frozenset(nn.Module().__dict__)
# of each module its attributes, and what was in those that are containers
Attributes = dict[nn.Module, tuple[dict[str, Any], dict[str, Any]]]


def attributes_of(model: nn.Module) -> Attributes:
    """Returns what each module holds, for `restored`."""
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
    """Yields what was set on modules since, or put into their containers: module, name, and the value now."""
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
                was[name].clear()
                (was[name].extend if hasattr(was[name], "extend") else was[name].update)(content)
                found = (module, name)
    return found


def redrawn(before: State) -> bool:
    """Puts the host's generators back; returns whether anything had been drawn."""
    drawn = differ(before, HOST.everything())
    if drawn:
        HOST.restore(before)
    return drawn


def holds(container: Any, content: Any) -> bool:
    """Returns True if a container holds the same objects."""
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        return all(key in container and container[key] is value for key, value in content.items())
    if isinstance(container, set):
        return container == content
    return all(a is b for a, b in zip(container, content, strict=True))


@contextmanager
def preserved_state(model: nn.Module, *devices: torch.device) -> Iterator[None]:
    """Restores buffers, modules' attributes, gradients and random state, whatever runs inside."""
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


FEW = 2  # samples


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of a model: that of its first parameter or buffer, else the CPU."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def a_few(example: tuple[Any, ...]) -> tuple[Any, ...]:
    """The example, but of no more than `FEW` samples."""
    return resized(example, min(FEW, samples_of(example)))


def resized(example: tuple[Any, ...], samples: int) -> tuple[Any, ...]:
    """The example with another number of samples, those that it has in turn."""
    batch = samples_of(example)

    def resize(leaf: Tensor) -> Tensor:
        if not leaf.dim() or len(leaf) != batch or batch == samples:
            return leaf
        if samples < batch:
            return leaf[:samples].clone()  # what is changed in place is no one's
        return leaf[torch.arange(samples, device=leaf.device) % batch]

    return map_tensors(resize, example)


def to_device(values: Any, device: torch.device) -> Any:
    """Copies always, as a pass may change its input in place; unwraps `Whole` arguments."""
    return map_tensors(lambda tensor: tensor.detach().to(device, copy=True), unmarked(values))
