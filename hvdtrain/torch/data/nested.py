"""Tensors in nested values: tuples (named ones too), lists and mappings are walked, and the rest stays as it is.

Not by PyTorch's own pytree, to which a class of dict that it does not know, or another mapping (what tokenizers
return), is a leaf: its tensors would be left where they are, or go whole where they should be cut.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(change: Callable[[Any], Any], values: Any, kind: type = Tensor) -> Any:
    """Returns `values` with every tensor in it changed, or everything of another kind."""
    if isinstance(values, kind):
        return change(values)
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*(map_tensors(change, part, kind) for part in values))
    if isinstance(values, (tuple, list)):
        return type(values)(map_tensors(change, part, kind) for part in values)
    if isinstance(values, Mapping):
        # what else it has (a default, an order, attributes) stays
        changed = copy.copy(values) if isinstance(values, MutableMapping) else dict(values)
        for key, part in values.items():
            changed[key] = map_tensors(change, part, kind)
        return changed
    return values


def tensors_of(values: Any) -> list[Tensor]:
    """Returns the tensors in nested values, in order; those in the fields of a dataclass too."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = list(values.values())
    elif dataclasses.is_dataclass(values):
        values = list(vars(values).values())
    return [tensor for part in values for tensor in tensors_of(part)] if isinstance(values, (tuple, list)) else []


def to_device(values: Any, device: torch.device) -> Any:
    """Returns `values` on `device`; the copy from pinned memory does not wait."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), values)


def batch_size(values: Any) -> int:
    """Returns the samples in a batch: the length of the first tensor that has one; 0 without."""
    return next((len(tensor) for tensor in tensors_of(values) if tensor.dim() and len(tensor)), 0)


def cut(values: Any, samples: int, start: int, stop: int) -> Any:
    """Returns a piece of a batch: of tensors as long as `samples` these rows, anything else whole."""
    return map_tensors(lambda t: t[start:stop] if t.dim() and len(t) == samples else t, values)
