"""Finds by trial what a loss of a user's own divides by, so that each rank's part of it can be weighed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.values.generators import of_all_gpus
from hvdtrain.values.preserved import kept_buffers, kept_modes

SHARE = "a sum, divided by num_items_in_batch"
ITEMS = "a mean over labels that are not -100"
SAMPLES = "a mean over samples"
KINDS = frozenset({SHARE, ITEMS, SAMPLES})
Count = Callable[[Any], Any]


def kinds_of(
    loss_of: Callable[[Any, Any], Tensor],
    batch: Mapping[str, Any],
    samples: int,
    items: Any,
    count: Count,
    *,
    exact: bool,
) -> tuple[frozenset[str], bool]:
    """Returns the kinds that a loss can be of, and True if it was compared with the losses of two parts of the batch.

    Args:
        loss_of: returns the loss of a batch, given the number of items to divide by.
        batch: of `samples` samples.
        items: the update's number of items; None: the loss has no use for it.
        count: returns the items of a batch.
        exact: False in mixed or half precision, where losses differ by rounding.
    """
    cut = max(samples // 3, 1)  # uneven, so that a mean of two means is not the mean
    cuts = [_rows(batch, rows, samples) for rows in (slice(samples), slice(cut), slice(cut, samples))]
    parts = [part for part in cuts if part is not None]
    divisible = samples > 1 and len(parts) == 3
    if not divisible:
        if items is None:
            return frozenset({SAMPLES} if count(batch) is None else {ITEMS, SAMPLES}), False
        once, half = loss_of(dict(batch), items), loss_of(dict(batch), items * 2)
        sums = {SHARE: half * 2, ITEMS: half, SAMPLES: half}
    else:
        once, first, rest = (loss_of(dict(part), items) for part in parts)  # a loss may take labels out
        sums = {SAMPLES: _mean((first, cut), (rest, samples - cut))}
        counts = count(parts[1]), count(parts[2])
        if items is not None:
            sums[SHARE] = first + rest
        if None not in counts:
            sums[ITEMS] = _mean((first, counts[0]), (rest, counts[1]))
    if not torch.isfinite(once):
        return KINDS, divisible  # a batch without items, or a loss that has diverged
    tolerance = 2e-2 if not exact else 1e-6 if once.dtype == torch.float64 else 1e-4
    near = {kind for kind, total in sums.items() if abs(float(total - once)) <= tolerance * abs(float(once))}
    return frozenset(near), divisible


def _mean(*terms: tuple[Tensor, Any]) -> Tensor:
    """Returns the mean of losses by weight; a part without items has no mean."""
    live = [(loss * weight, weight) for loss, weight in terms if weight]
    return torch.as_tensor(sum(total for total, _ in live) / max(float(sum(weight for _, weight in live)), 1.0))


def _rows(batch: Mapping[str, Any], rows: slice, samples: int) -> dict[str, Any] | None:
    """Returns a copy of some samples of a batch; None if a value has not one row for each sample."""
    part = {}
    for name, value in batch.items():
        if isinstance(value, (Tensor, list)) and (isinstance(value, list) or value.dim()):
            if len(value) != samples:
                return None
            part[name] = value[rows] if isinstance(value, list) else value[rows].clone()
        elif isinstance(value, (Mapping, tuple)):
            return None
        else:
            part[name] = value
    return part


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Runs the block in eval mode, without gradients; restores modes, buffers and random states."""
    parts = list(model.modules())
    with kept_modes(parts), kept_buffers(parts), of_all_gpus().preserved(), torch.no_grad():
        model.eval()
        yield
