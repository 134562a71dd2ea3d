"""Makes a loader of the user's data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.keywords import refuses_other_keywords
from hvdtrain.core.sharding import Plan
from hvdtrain.torch.data.loader import Loader
from hvdtrain.torch.data.memory import Memory, MemoryRows, memory_of
from hvdtrain.torch.data.processes import Processes
from hvdtrain.torch.data.source import Augment
from hvdtrain.torch.data.streams import Get, Streamed, StreamLoader, drawn_by_epoch
from hvdtrain.torch.data.workers import Workers
from hvdtrain.torch.engines.engine import device_of
from hvdtrain.world import same_data
from hvdtrain.world.records import BATCH_SAMPLER, SAMPLER, STREAM, StreamHead, StreamWords, check_heads, stream_of
from hvdtrain.world.resources import usable_cores, workers_for
from hvdtrain.world.streams import StreamPlan
from hvdtrain.world.world import World, given_or_current


def augment_of(data: Any) -> Augment | None:
    """Returns the augmentation that a data set brings along, if it does."""
    brought = getattr(data, "augment", None)
    return brought if hasattr(brought, "draws") else None


def _is_stream(data: Any) -> bool:
    """Returns True for what is read from its beginning, and not by index."""
    by_index = all(hasattr(data, name) for name in ("__getitem__", "__len__"))
    by_index = by_index or isinstance(data, (tuple, Mapping, type))
    return isinstance(data, IterableDataset) or not (by_index or isinstance(data, (str, bytes, DataLoader)))


def _dataset_of(data: Any) -> Any:
    """Returns a data set that is read by index; raises `ConfigError` for any other data."""
    received = remedy = ""
    if isinstance(data, Mapping) and 0 not in data:
        received = f"a {type(data).__name__} of {', '.join(map(str, list(data)[:5]))}"
        remedy = "torch.utils.data.StackDataset(**data) of arrays makes such dicts of batches; or use a tuple of arrays"
    elif _is_stream(data) or isinstance(data, (DataLoader, type)) or not hasattr(data, "__getitem__"):
        received = f"the class {data.__name__}" if isinstance(data, type) else f"a {type(data).__name__}"
        remedy = "give the Dataset, not its DataLoader; sampler= and batch_sampler= need a Dataset"
    if received:
        rule = "data must be a tuple of arrays, a data set that has len(data) and data[i], or a stream"
        raise ConfigError(rule, received, remedy)
    return data


def source_of(
    data: Any, device: torch.device, processes: Processes, collate: Callable[[list[Any]], Any] | None, *, auto: bool
) -> Memory | Workers:
    """Returns what serves `data` by index; "auto" reads arrays in this process. Raises `ConfigError` for other data."""
    memory = memory_of(data, device if collate is None else torch.device("cpu"))
    if memory is not None and collate is None:
        return memory
    if memory is None:
        return Workers(_dataset_of(data), processes, collate)
    return Workers(MemoryRows(memory), replace(processes, count=0) if auto else processes, collate)


def _refuse_sampler(sampler: Any) -> None:
    if any(isinstance(part, DistributedSampler) for part in (sampler, getattr(sampler, "sampler", None))):
        raise ConfigError(
            "sampler= must be the order of all samples, the same on every rank",
            "a DistributedSampler, which has only one rank's samples",
            "remove it: loader(dataset, per_rank_batch) shuffles, and gives each rank its part",
        )


def _processes(
    workers: int | Literal["auto"],
    world: World,
    device: torch.device,
    *,
    by_index: bool,
    decodes: bool,
    prefetch: int,
    init: Callable[[int], None] | None,
) -> Processes:
    if workers != "auto" and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 0):
        raise ConfigError('workers must be "auto" or a whole number >= 0', f"workers={workers!r}")
    on_gpu = device.type == "cuda"
    if workers != "auto":
        return Processes(workers, on_gpu, prefetch, init)
    count = workers_for(usable_cores(world), on_gpu=on_gpu)
    if not by_index:  # each worker walks the whole stream: more than one helps to decode
        count = max(count, 1) if decodes else 1
    return Processes(count, on_gpu, prefetch, init)


@refuses_other_keywords(
    batch_size="per_rank_batch=, the samples that each rank takes in a step",
    num_workers="workers=",
    collate_fn="collate=",
    drop_last='tail="drop"; by default the tail is weighted exactly',
    generator="seed=",
)
def loader(
    data: Any,
    per_rank_batch: int | None = None,
    *,
    world: World | None = None,
    shuffle: bool = True,
    tail: Literal["weighted", "drop"] = "weighted",
    workers: int | Literal["auto"] = "auto",
    augment: Augment | None = None,
    seed: int | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
    sampler: Any = None,
    batch_sampler: Any = None,
    worker_init_fn: Callable[[int], None] | None = None,
    prefetch_factor: int = 2,
) -> Loader:
    """Returns this rank's loader of training batches; collective.

    Each sample comes once an epoch over all ranks, in an order that does not depend on the number of ranks.

    Example:
        train = hvt.loader(dataset, per_rank_batch=32, workers=4)
        stream = hvt.loader(lambda epoch: open("train.jsonl"), per_rank_batch=32, decode=json.loads)

    Args:
        data: the same on every rank: arrays or tensors of all samples, as a tuple `(x, y, ...)` (served in whole
            batches from memory, the GPU's if they fit), or a map-style `torch.utils.data.Dataset`. Or a stream, which
            keeps its order: an `IterableDataset`, any other iterable that can be read again (`set_epoch(epoch)` is
            called if it has one), or a function `records(epoch)` that returns one. Every rank reads all of a stream.
        per_rank_batch: samples of a rank in a full step.
        world: the ranks; default: those of `hvdtrain.init`.
        shuffle: False keeps the data's order; a stream and a sampler have their own order.
        tail: samples that fill no global step are dealt and weighed exactly ("weighted"), or skipped ("drop").
        workers: processes that read a `Dataset` or a stream; "auto" fits them to the cores of this rank.
        augment: called with each batch's first part, on the device, and `augment.draws` uniform numbers per sample,
            which depend only on the sample's place in the epoch; default: `data.augment` if there is one.
        seed: the seed of order and augmentation; default: the world's. Loaders of equal length in one loop need
            different seeds.
        collate: makes a batch of a list of samples (of arrays: of their rows); default:
            `torch.utils.data.default_collate`.
        decode: makes a sample of a stream's record; called for this rank's records only. Its random numbers depend only
            on the record's place in the epoch.
        sampler: the order of all ranks, as indices, as `DataLoader` takes it: an iterable, or a function of the epoch.
            Its generators are set by `seed` and epoch.
        batch_sampler: the order as lists of indices: each is one global batch, dealt to the ranks in contiguous pieces
            and weighed by their lengths. The learning rate is then computed from `per_rank_batch`; default: from the
            sampler's `batch_size`.
        worker_init_fn: called in each worker process with its number, before it reads.
        prefetch_factor: batches that each worker makes ahead.

    Raises:
        ConfigError: an argument is wrong, or the data has no samples.
        ReplicaError: ranks gave different data, the same data in another order, or different batches, seeds or orders.
    """
    world = given_or_current(world, "torch")
    seed = world.seed if seed is None else seed
    device = device_of(world)
    whole_batches = _whole_batches(per_rank_batch, sampler, batch_sampler, world)
    by_index = not _is_stream(data)
    if decode is not None and (by_index or sampler is not None):
        raise ConfigError(
            "decode= needs a stream, and no sampler=", f"a {type(data).__name__}, which is read by index",
            "decode in the data set's __getitem__",
        )  # fmt: skip
    processes = _processes(
        workers, world, device, by_index=by_index, decodes=decode is not None,
        prefetch=prefetch_factor, init=worker_init_fn,
    )  # fmt: skip
    batch = per_rank_batch if per_rank_batch is not None else -(-whole_batches // world.size)
    order = batch_sampler if sampler is None else sampler
    kind = STREAM if order is None else BATCH_SAMPLER if sampler is None else SAMPLER
    augment = augment or augment_of(data)
    if by_index or order is not None:
        source = source_of(data, device, processes, collate, auto=workers == "auto")
        plan = Plan(source.samples, world.size, batch, seed=seed, shuffle=shuffle, tail=tail)
        _compare(world, source, plan, whole_batches)
        if order is None:
            return Loader(source, plan, world, augment=augment)
        _refuse_sampler(order)
        begin = drawn_by_epoch(order, stream_of(order, kind), seed)
        get = source if isinstance(source, Memory) else Get(source.dataset, None)
        processes = Processes(0) if isinstance(get, Memory) else processes
    else:
        begin, get = stream_of(data), Get(None, decode)
    stream = StreamPlan(
        0, world.size, batch, seed=seed, shuffle=False, tail=tail, whole_batches=whole_batches, kind=kind
    )
    walked = Streamed(begin, get, processes, collate, kind)
    world.agree("data (batch, seed, tail)", (batch, seed, tail, whole_batches, kind.name))
    return StreamLoader(walked, stream, world, augment=augment, begins=_begin(world, walked, kind, seed))


def _begin(world: World, walked: Streamed, kind: StreamWords, seed: int) -> StreamHead:
    begins = walked.head(seed)
    if world.size > 1:
        check_heads(world, begins)
    if begins.records == 0:
        raise ConfigError("training needs samples", f"{kind.name} has no {kind.one}", "give data", shared=True)
    return begins


def _compare(world: World, source: Any, plan: Plan, whole_batches: int) -> None:
    """Raises `ReplicaError` where ranks have other data, `ConfigError` where there is none; collective."""
    world.agree("data (samples, batch, seed, order, tail)", {**vars(plan), "whole_batches": whole_batches})
    if plan.samples == 0:
        raise ConfigError("training needs samples", "the data set has none", "give data", shared=True)
    if world.size > 1:
        same_data.check(world, source.digest())


def _whole_batches(per_rank_batch: int | None, sampler: Any, batch_sampler: Any, world: World) -> int:
    """Returns how many samples a batch of `batch_sampler` has as a rule; 0 without one."""
    if sampler is not None and batch_sampler is not None:
        raise ConfigError("sampler= and batch_sampler= cannot be combined", "both", "give batch_sampler= alone")
    size = getattr(batch_sampler, "batch_size", None)
    if per_rank_batch is None and not (isinstance(size, int) and size > 0):
        raise ConfigError(
            "loader() needs per_rank_batch=, the samples of a rank in a step",
            "per_rank_batch was not given" + (", nor a batch_sampler with batch_size" if batch_sampler else ""),
            "loader(dataset, per_rank_batch=32)",
            code=10,
        )
    if batch_sampler is None:
        return 0
    return int(size) if per_rank_batch is None and size is not None else per_rank_batch * world.size  # type: ignore
