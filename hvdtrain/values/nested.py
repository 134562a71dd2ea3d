"""Tensors in nested values: walks tuples, lists, mappings, dataclasses and the other containers of PyTorch's pytree (a
deque); any other value stays as it is.

The pytree alone is not enough: it takes an unknown class of dict, or another mapping (what tokenizers return), for a
leaf. Its tensors would stay where they are, or stay whole where they should be cut.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdtrain.private.torch import pytree


def moves_itself(values: Any) -> bool:
    """Returns whether a value is no mapping, and knows how to go to a device: a packed sequence, a batch of graphs."""
    return not isinstance(values, (Tensor, Mapping, type)) and callable(getattr(values, "to", None))


def parts_of(values: Any) -> dict[Any, Any] | None:
    """Returns what a nested value is made of, by its place or name; None for any other value."""
    if isinstance(values, Mapping):
        return {name: values[name] for name in values}
    if isinstance(values, (tuple, list)):
        return dict(enumerate(values))
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        names = (field.name for field in dataclasses.fields(values))
        return {name: getattr(values, name) for name in names if hasattr(values, name)}
    known = pytree.SUPPORTED_NODES.get(type(values))
    return None if known is None else dict(enumerate(known.flatten_fn(values)[0]))


def made_of(parts: dict[Any, Any], example: Any) -> Any:
    """Returns a nested value like `example`, of other parts (`parts_of`); what else it has (a default, an order,
    attributes) is the example's. The example stays as it is."""
    if isinstance(example, (tuple, list)):
        named = hasattr(example, "_fields")
        return type(example)(*parts.values()) if named else type(example)(parts.values())
    if not isinstance(example, Mapping):
        if not dataclasses.is_dataclass(example):
            known = pytree.SUPPORTED_NODES[type(example)]
            return known.unflatten_fn(parts.values(), known.flatten_fn(example)[1])
        made: Any = copy.copy(example)
        for name, part in parts.items():
            object.__setattr__(made, name, part)  # frozen ones too
        return made
    if not isinstance(example, MutableMapping):
        return parts
    if isinstance(example, dict) or hasattr(example, "__copy__"):
        made = copy.copy(example)
    else:  # copied by its attributes it would share the dict behind it with the example
        made = copy.deepcopy(example, {id(part): part for part in example.values()})
    for name, part in parts.items():
        made[name] = part
    return made


def map_tensors(change: Callable[[Any], Any], values: Any, kind: type = Tensor) -> Any:
    """Returns `values` with every tensor in it changed, or everything of another kind."""
    return _map(lambda part: isinstance(part, kind), change, values)


def _map(is_leaf: Callable[[Any], bool], change: Callable[[Any], Any], values: Any) -> Any:
    if is_leaf(values):
        return change(values)
    parts = parts_of(values)
    if parts is None:
        return values
    return made_of({name: _map(is_leaf, change, part) for name, part in parts.items()}, values)


def tensors_of(values: Any) -> list[Tensor]:
    """Returns the tensors in nested values, in order."""
    if isinstance(values, Tensor):
        return [values]
    parts = parts_of(values)
    if parts is None and moves_itself(values):
        parts = dict(getattr(values, "__dict__", {}))
    return [tensor for part in (parts or {}).values() for tensor in tensors_of(part)]


def to_device(values: Any, device: torch.device) -> Any:
    """Returns `values` on `device`; the copy from pinned memory does not wait."""

    def move(part: Any) -> Any:
        return part.to(device, non_blocking=True) if isinstance(part, Tensor) else part.to(device)

    return _map(lambda part: isinstance(part, Tensor) or moves_itself(part), move, values)


def batch_size(values: Any) -> int:
    """Returns the samples in a batch: the length of the first tensor that has one; 0 without."""
    return next((len(tensor) for tensor in tensors_of(values) if tensor.dim() and len(tensor)), 0)


def cut(values: Any, samples: int, start: int, stop: int) -> Any:
    """Returns a piece of a batch: these rows of tensors and lists of texts that are `samples` long, all else whole."""

    def rows(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part[start:stop] if part.dim() and len(part) == samples else part
        return part[start:stop]

    def texts(part: Any) -> bool:
        whole = isinstance(part, (list, tuple)) and not hasattr(part, "_fields") and len(part) == samples
        return whole and all(isinstance(text, (str, bytes)) for text in part)

    return _map(lambda part: isinstance(part, Tensor) or texts(part), rows, values)


def join(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    refused: Callable[[str, Sequence[int]], Exception],
    device: torch.device | None = None,
) -> Any:
    """Returns the nested outputs of a batch's pieces as one: values with a row for each sample are concatenated.

    Args:
        outputs: of each piece.
        sizes: samples of each piece.
        refused: makes the error for outputs that cannot be joined, from these and from `sizes`. A scalar is one: its
            value does not show whether it is a mean, a sum or a count, and over what; its graph does not always.
        device: the device of the result; default: that of the first output.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, Tensor):
        if any(not output.dim() or len(output) != size for output, size in zip(outputs, sizes, strict=True)):
            raise refused(f"tensors of shapes {[tuple(output.shape) for output in outputs]}", sizes)
        return torch.cat([output.to(device or first.device, non_blocking=True) for output in outputs])
    opened = [parts_of(output) for output in outputs]
    if opened[0] is not None:
        columns = {name: [parts[name] for parts in opened if parts is not None] for name in opened[0]}
        return made_of({name: join(column, sizes, refused, device) for name, column in columns.items()}, first)
    counted = type(first) is int and list(outputs) == list(sizes)  # len(x)
    if not counted and all(output is first or output == first for output in outputs):
        return first
    raise refused(f"{type(first).__name__}: {', '.join(map(repr, outputs))}", sizes)
