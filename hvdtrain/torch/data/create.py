"""From what the user gives as data to the loader that serves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset

from hvdtrain.core import same_data
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.resources import usable_cores, workers_for
from hvdtrain.core.sharding import Plan
from hvdtrain.core.world import World, given_or_current
from hvdtrain.torch.data.loader import Loader
from hvdtrain.torch.data.memory import Rows, memory_of
from hvdtrain.torch.data.source import Augment, Source
from hvdtrain.torch.data.workers import Workers
from hvdtrain.torch.engine import device_of


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
    if isinstance(data, Mapping) and 0 not in data:
        raise ConfigError(
            "data is a tuple of arrays, or a data set that is read by index (len(data), data[i])",
            f"a {type(data).__name__} of {', '.join(map(str, list(data)[:5]))}",
            "torch.utils.data.StackDataset(**data) of arrays, whose batches are such dicts; or a tuple of its parts",
        )
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


def loader(
    data: Any,
    per_rank_batch: int,
    *,
    world: World | None = None,
    shuffle: bool = True,
    tail: Literal["weighted", "drop"] = "weighted",
    workers: int | Literal["auto"] = "auto",
    augment: Augment | None = None,
    seed: int | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Loader:
    """Returns this rank's training batches: each sample once an epoch over all ranks, in an order that does not depend
    on how many ranks there are; collective.

    Args:
        data: the same on every rank: arrays or tensors of all samples, as a tuple `(x, y, ...)` (served in whole
            batches from memory, the GPU's if they fit), or a map-style `torch.utils.data.Dataset`.
        per_rank_batch: samples a rank takes in a full step.
        world: the ranks; by default those of `hvdtrain.init`.
        shuffle: False keeps the data's order.
        tail: samples that do not fill a global step are dealt out and weighed exactly, or left out ("drop").
        workers: processes that read a `Dataset`; "auto" sizes them to the cores that this rank really has.
        augment: called with each batch's first part, on the device, and `augment.draws` uniform numbers a sample,
            which depend on the sample's place in the epoch only; by default `data.augment` if there is one.
        seed: of order and augmentation; by default the world's. Loaders of as many samples with the same seed have the
            same order: two of them in one loop are refused.
        collate: makes a batch of a list of samples (of arrays: of their rows); by default
            `torch.utils.data.default_collate`.

    Raises:
        ConfigError: an argument is wrong, or the data has no samples.
        ReplicaError: ranks gave different data, or the same in another order, or different batches, seeds or orders.
    """
    world = given_or_current(world, "torch")
    seed = world.seed if seed is None else seed
    source = source_of(data, world, workers=workers, collate=collate)
    plan = Plan(source.samples, world.size, per_rank_batch, seed=seed, shuffle=shuffle, tail=tail)
    world.agree("data (samples, batch, seed, order, tail)", (*vars(plan).values(),))
    if plan.samples == 0:
        raise ConfigError("training needs samples", "the data set has none", "give data", shared=True)
    if world.size > 1:
        same_data.check(world, source.digest())
    return Loader(source, plan, world, augment=augment or augment_of(data))
