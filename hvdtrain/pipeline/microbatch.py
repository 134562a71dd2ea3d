"""A batch cut into micro-batches, how much each counts, and their outputs joined again; values may be nested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.sharding import weight_number

# leaves of nested values besides tensors
SIMPLE = (int, float, bool, complex, str, torch.dtype, torch.device, type(None))
Chunk = Sequence[int | None] | None
Weight = float | Tensor | Callable[[Any], float | Tensor] | None
_EXAMPLES = (
    "weight=lambda y: (y != -100).sum() for ignore_index, weight=lambda y: class_weights[y].sum() for class weights"
)


@dataclass(frozen=True)
class Whole:
    """An argument that goes to every micro-batch as it is."""

    value: Any


def marked(arguments: tuple[Any, ...], chunk: Chunk) -> tuple[Any, ...]:
    """The arguments, those that have no samples as `Whole`.

    Args:
        chunk: for each argument 0 or None; as of `split`.

    Raises:
        ConfigError: another number of arguments, or another dimension.
    """
    if chunk is None:
        return arguments
    if len(chunk) != len(arguments) or any(one is not None and one is not False and one != 0 for one in chunk):
        raise ConfigError(
            "chunk=[...] says for each argument 0 (its tensors have samples along dimension 0) or None (it has none)",
            f"chunk={list(chunk)} for {len(arguments)} argument(s)",
            "a model that takes [sequence, batch, ...]: split one that takes [batch, sequence, ...] and transposes",
        )
    return tuple(Whole(value) if one is None else value for value, one in zip(arguments, chunk, strict=True))


def unmarked(values: Any) -> Any:
    """Without `Whole`."""
    return pytree.tree_map_only(Whole, lambda whole: whole.value, values)


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
    received = ", ".join(type(value).__name__ for value in arguments) or "nothing"
    raise ConfigError("a batch holds a tensor whose dimension 0 counts the samples", received)


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
        if isinstance(leaf, Whole):
            leaf = leaf.value
        elif not isinstance(leaf, (Tensor, *SIMPLE)) or (every is not None and isinstance(leaf, str)):
            raise ConfigError(
                f"{every or 'inputs'} are tensors and numbers, in tuples, lists and dicts: else nobody knows how to"
                " cut them into micro-batches",
                f"a {type(leaf).__name__}",
                "dict(batch), or a tuple of its tensors; inputs without samples: split(..., chunk=[0, None])",
            )
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
        if isinstance(leaves[0], SIMPLE) and all(leaf == leaves[0] for leaf in leaves[1:]):
            return leaves[0]
        raise ConfigError(
            "outputs of a pipeline are tensors in tuples, lists and dicts, to be joined from micro-batches",
            f"a {type(leaves[0]).__name__}",
            "a model that returns its tensors: wrap it in a module whose forward ends with, for example, .logits",
        )
    if any(leaf.dim() == 0 or len(leaf) != size for leaf, size in zip(leaves, sizes, strict=True)):
        raise ConfigError(
            "outputs of a pipeline have one entry for each sample, to be joined from micro-batches",
            f"shape {tuple(leaves[0].shape)} for {sizes[0]} samples",
            "micro_batches=1, or a model that returns values by sample",
        )
    return torch.cat(list(leaves))


# ---- how much each counts: by what its mean loss divides by


def shares(weight: Weight, targets: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """The part of the batch's gradient that each micro-batch makes; they sum to 1, or are all 0.

    Args:
        weight: as in `Pipeline.step`.
        targets: of each micro-batch.
        sizes: samples of each micro-batch.

    Raises:
        ConfigError: a weight that is no number >= 0, or a number for several micro-batches.
    """
    if weight is None:
        weights: list[float] = list(sizes)
    elif callable(weight):
        weights = [weight_number(weight(target), _EXAMPLES) for target in targets]
    else:
        weights = [weight_number(weight, _EXAMPLES)]
        if len(sizes) > 1:
            raise ConfigError(
                "a batch that is cut into micro-batches needs the weight of each of them",
                f"weight={weights[0]:g} for {len(sizes)} micro-batches",
                f"a function of the targets: {_EXAMPLES}",
            )
    total = sum(weights)
    return [one / total if one else 0.0 for one in weights]
