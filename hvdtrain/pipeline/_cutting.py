"""A batch cut into micro-batches, and their outputs joined again; values may be nested in tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hvdtrain.errors import ConfigError


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors in nested values, in order."""
    if type(values) is tuple and all(type(value) is Tensor for value in values):  # nearly always
        return list(values)
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def map_tensors(change: Callable[[Tensor], Any], values: Any) -> Any:
    """The same nested values with every tensor changed."""
    if type(values) is tuple and all(type(value) is Tensor for value in values):
        return tuple(map(change, values))
    return pytree.tree_map_only(Tensor, change, values)


def batch_size(arguments: tuple[Any, ...]) -> int:
    """Samples in a batch: the length of the first tensor.

    Raises:
        ConfigError: there is none.
    """
    for tensor in tensors_of(arguments):
        if tensor.dim():
            return len(tensor)
    came = ", ".join(type(value).__name__ for value in arguments) or "nothing"
    raise ConfigError("a batch holds a tensor whose dimension 0 counts the samples", came)


def cut(values: Any, sizes: Sequence[int], *, every: str | None = None) -> list[Any]:
    """Cuts every tensor that is as long as the batch; others (a mask for all samples, a number) go to all.

    Args:
        values: nested; tensors [batch, ...].
        sizes: samples of each micro-batch.
        every: what the values are, where all tensors must be as long as the batch.

    Raises:
        ConfigError: one is not, with `every`.
    """
    batch = sum(sizes)
    leaves, spec = pytree.tree_flatten(values)
    pieces: list[Sequence[Any]] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == batch:
            pieces.append(leaf.split(list(sizes)))
            continue
        if every is not None and isinstance(leaf, Tensor) and leaf.dim():
            raise ConfigError(
                f"{every} have one entry for each sample", f"shape {tuple(leaf.shape)} for a batch of {batch}"
            )
        pieces.append([leaf] * len(sizes))
    return [pytree.tree_unflatten(list(group), spec) for group in zip(*pieces, strict=True)]


def join(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Joins the outputs of the micro-batches: tensors [samples, ...] one after the other.

    Raises:
        ConfigError: an output has no dimension that counts the samples.
    """
    if len(outputs) == 1:
        return outputs[0]
    flat = [pytree.tree_flatten(output) for output in outputs]
    joined = [_join_leaf(leaves, sizes) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)]
    return pytree.tree_unflatten(joined, flat[0][1])


def _join_leaf(leaves: Sequence[Any], sizes: Sequence[int]) -> Any:
    if not isinstance(leaves[0], Tensor):
        return leaves[0]
    if any(leaf.dim() == 0 or len(leaf) != size for leaf, size in zip(leaves, sizes, strict=True)):
        raise ConfigError(
            "outputs of a pipeline have one entry for each sample, to be joined from micro-batches",
            f"shape {tuple(leaves[0].shape)} for {sizes[0]} samples",
            "micro_batches=1, or a model that returns values by sample",
        )
    return torch.cat(list(leaves))
