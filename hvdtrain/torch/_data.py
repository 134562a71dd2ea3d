"""From what the user gives as data to what serves it, and on which device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from hvdtrain.cores import usable_cores, workers_for
from hvdtrain.errors import ConfigError
from hvdtrain.torch._memory import Rows, memory_of
from hvdtrain.torch._session import device_of
from hvdtrain.torch._source import Source
from hvdtrain.torch._workers import Workers
from hvdtrain.world import World

# (batch [n, ...], uniforms float64 [n, augment.draws]) -> batch; for example `hvdtrain.torch.crop_flip`
Augment = Callable[[Tensor, Tensor], Tensor]


def augment_of(data: Any) -> Augment | None:
    """Returns the augmentation that a data set brings along, if it does."""
    brought = getattr(data, "augment", None)
    return brought if hasattr(brought, "draws") else None


def source_of(
    data: Any,
    world: World,
    *,
    workers: int | Literal["auto"],
    collate: Callable[[list[Any]], Any] | None,
) -> Source:
    """Returns what serves `data`; collective.

    Raises:
        ConfigError: not arrays, and not a map-style data set.
    """
    if workers != "auto" and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 0):
        raise ConfigError('workers is "auto" or a whole number >= 0', f"workers={workers!r}")
    device = device_of(world)
    cores = usable_cores(world)
    memory = memory_of(data, device if collate is None else torch.device("cpu"))
    if memory is not None and collate is None:
        return memory
    if memory is not None:
        data, workers = Rows(memory), 0 if workers == "auto" else workers
    usable = not isinstance(data, (DataLoader, IterableDataset)) and all(
        hasattr(data, name) for name in ("__getitem__", "__len__")
    )
    if not usable:
        raise ConfigError(
            "data is a tuple of arrays, or a data set that is read by index (len(data), data[i])",
            f"a {type(data).__name__}",
            "give the Dataset itself, not its DataLoader; a stream (IterableDataset) cannot be dealt out exactly",
        )
    count = workers_for(cores, on_gpu=device.type == "cuda") if workers == "auto" else workers
    return Workers(data, workers=count, collate=collate, pin_memory=device.type == "cuda")
