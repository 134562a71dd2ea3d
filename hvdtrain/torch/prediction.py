"""Prediction on all ranks together: the outputs of every sample, each once, in the data's order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.world import World, given_or_current
from hvdtrain.torch.data.loader import Loader
from hvdtrain.torch.data.nested import map_tensors, tensors_of
from hvdtrain.torch.data.source import Augment
from hvdtrain.torch.evaluation import one_pass


def predict(
    model: nn.Module,
    data: Any,
    *,
    per_rank_batch: int | None = None,
    world: World | None = None,
    workers: int | Literal["auto"] = "auto",
    augment: Augment | None = None,
    inputs: Callable[[Any], Any] = lambda batch: batch,
    on_main: bool = False,
) -> Any:
    """Returns the model's outputs for all samples, on the CPU, in the data's order, each once; collective.

    Replicas' buffers are made equal first. The model is in evaluation mode while it runs, without gradients.

    Args:
        model: called with a batch; with its parts where it is a tuple or list.
        data: the same on every rank: what `loader` takes, or a `Loader`.
        per_rank_batch: samples a rank takes at a time; not needed with a `Loader`.
        world: the ranks; by default those of `hvdtrain.init`.
        workers: as of `loader`.
        augment: as of `loader`; here for what turns samples into inputs (`normalise`).
        inputs: makes of a batch what the model is called with; of data with targets `lambda batch: batch[0]`.
        on_main: rank 0 alone gets them; None elsewhere.

    Returns:
        What the model returns (a tensor, or tuples, dicts, dataclasses of them), with all samples along dimension 0.

    Raises:
        ConfigError: no samples, some that cannot be read, or outputs that have no row for each sample.
    """
    world = given_or_current(world, "torch")
    with one_pass(model, data, per_rank_batch, world, workers, augment) as batches:
        mine = _outputs(model, batches, inputs)
        return _in_order(world.gather(mine), wanted=world.is_main or not on_main)


@dataclass(frozen=True)
class _Place:
    """Stands for the tensor of this number in outputs."""

    number: int


@dataclass(frozen=True)
class _Part:
    """A rank's outputs: which samples', of each tensor the rows, and what they are nested in."""

    samples: np.ndarray
    tensors: list[Tensor]
    form: Any
    unread: list[tuple[str, str]]


def _outputs(model: nn.Module, batches: Loader, inputs: Callable[[Any], Any]) -> _Part | None:
    """This rank's; None if it has no samples."""
    samples: list[np.ndarray] = []
    pieces: list[list[Tensor]] = []
    form: Any = None
    for batch, step in batches.one_pass():
        given = inputs(batch)
        outputs = model(*given) if isinstance(given, (tuple, list)) else model(given)
        tensors = [tensor.detach().cpu() for tensor in tensors_of(outputs)]
        wrong = [tuple(tensor.shape) for tensor in tensors if tensor.dim() == 0 or len(tensor) != step.samples]
        if wrong or not tensors:
            raise ConfigError(
                "outputs are tensors with a row for each sample",
                f"{wrong[0] if wrong else type(outputs).__name__} for {step.samples} samples",
                "return per-sample outputs from the model, batch first",
            )
        numbers = iter(range(len(tensors)))
        form = map_tensors(lambda _, numbers=numbers: _Place(next(numbers)), outputs)  # type: ignore[misc]
        samples.append(step.indices)
        pieces.append(tensors)
    if not pieces:
        return None
    return _Part(np.concatenate(samples), [_joined(rows) for rows in zip(*pieces, strict=True)], form, batches.skipped)


def _joined(rows: tuple[Tensor, ...]) -> Tensor:
    """All rows of one output; a copy, so that what travels is no larger than they are."""
    if len({(tensor.shape[1:], tensor.dtype) for tensor in rows}) > 1:
        raise ConfigError(
            "an output has the same shape in every batch, but for the samples",
            ", ".join(sorted({str(tuple(tensor.shape)) for tensor in rows})),
            "pad it to one length, in the model or in collate=",
        )
    return torch.cat(rows)


def _in_order(parts: list[_Part | None], *, wanted: bool) -> Any:
    found = [part for part in parts if part is not None]
    unread = [name for part in found for name, _ in part.unread]
    if not found or unread:
        raise ConfigError(
            "prediction gives the outputs of all samples",
            f"{len(unread)} cannot be read, the first: {unread[0]}" if unread else "there is no sample",
            "leave them out of the data" if unread else "give data",
            shared=True,
        )
    if not wanted:
        return None
    order = torch.from_numpy(np.argsort(np.concatenate([part.samples for part in found]), kind="stable"))
    tensors = [_joined(rows)[order] for rows in zip(*(part.tensors for part in found), strict=True)]
    return map_tensors(lambda place: tensors[place.number], found[0].form, _Place)
