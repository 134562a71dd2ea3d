"""A model that ends as it was: the modes of its modules, and its buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

Saved = list[tuple[nn.Module, str, Tensor, Tensor]]  # each buffer's module and name, itself, a copy


@contextmanager
def kept_modes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Leaves each module in the mode it was in (frozen parts differ), without `train()`, which models override."""
    before = [(module, module.training) for module in modules]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def kept_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Leaves the buffers of these modules, without those of their parts, as they were."""
    saved = buffers_of(modules)
    try:
        yield
    finally:
        put_back(saved)


def buffers_of(modules: Iterable[nn.Module]) -> Saved:
    """Returns the buffers of these modules, to be `put_back`."""
    return [
        (module, name, buffer, buffer.detach().clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def put_back(saved: Saved) -> None:
    """Puts buffers back: the tensors they were, with the values they had."""
    for module, name, buffer, value in saved:
        module._buffers[name] = buffer
        buffer.data.copy_(value)
