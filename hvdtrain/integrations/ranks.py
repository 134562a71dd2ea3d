"""The ranks as Lightning's Trainer and Fabric ask for them: collectives, data, metrics and state of all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.utils import data as torch_data
from torchmetrics import Metric

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain import ConfigError, Step, World
from hvdtrain.torch.update.whole import is_whole
from hvdtrain.values.preserved import kept_buffers


def joined(engine: str, device: str) -> tuple[World, torch.device]:
    """Returns the ranks, joined now unless `hvdtrain.init` has joined them, and this rank's device."""
    world = hvdtrain.current() or hvdtrain.init("torch", engine=engine, device=device, seed=_seed())
    return world, torch.device("cuda", world.devices[0]) if world.devices else torch.device("cpu")


def _seed() -> int | None:
    return int(os.environ["PL_GLOBAL_SEED"]) if "PL_GLOBAL_SEED" in os.environ else None


class LightningRanks(LightningEnvironment):
    """The ranks of an hvdtrain world, as Lightning asks for them."""

    creates_processes_externally = True

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.set_world_size(world.size)
        self.set_global_rank(world.rank)

    def local_rank(self) -> int:
        return self._world.local_rank

    def node_rank(self) -> int:
        return self._world.node

    def teardown(self) -> None:
        """Leaves the launcher's variables as they are."""


class Collectives:
    """The collectives of a Lightning strategy, on the ranks of `world`."""

    world: World
    parallel_devices: Any

    @property
    def root_device(self) -> torch.device:
        device: torch.device = self.parallel_devices[0]
        return device

    def barrier(self, name: str | None = None) -> None:
        self.world.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.world.broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        decisions = self.world.gather(bool(decision))
        return min(decisions) if all else max(decisions)

    def reduced(self, tensor: Tensor, reduce_op: Any, weight: float | None, group: Any = None) -> Tensor:
        """Returns the reduction over ranks; a mean is weighed by each rank's `weight`, unless that is None."""
        self._check_group(group)
        op: Any = operation(reduce_op)
        tensor = tensor.detach()
        if op == "mean" and not tensor.is_floating_point():
            tensor = tensor.double()  # Lightning's own mean of integers is rounded down
        if op != "mean" or weight is None:
            return hvt.reduce(tensor, op, world=self.world)
        own = torch.full_like(tensor, weight)
        total, weights = hvt.reduce(torch.stack([tensor * own, own]), "sum", world=self.world)
        return total / weights

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns [size, ...] of all ranks' tensors; with `sync_grads` they have a gradient."""
        self._check_group(group)
        if self.world.size == 1:
            return tensor
        shapes = self.world.gather(tuple(tensor.shape))
        if len(set(shapes)) > 1:
            raise ConfigError(
                "all_gather() needs tensors of one shape", f"by rank: {shapes}",
                "drop_last=True in the DataLoader; or, in a LightningModule with automatic optimization,\n"
                "hvdtrain.torch.whole(values) joins rows of any number", shared=True,
            )  # fmt: skip
        if sync_grads and tensor.requires_grad and torch.is_grad_enabled():
            return self.gather_to_differentiate(tensor)
        flat = hvt.gather(tensor.detach().reshape(1, -1), world=self.world)
        return flat.reshape(self.world.size, *tensor.shape)

    def gather_to_differentiate(self, tensor: Tensor) -> Tensor:
        gathered: Tensor = _Gather.apply(tensor, self.world)
        return gathered

    def _check_group(self, group: Any) -> None:
        if group is not None and group is not torch.distributed.group.WORLD:
            raise ConfigError(
                "collectives must be of all ranks", f"group={group!r}", "remove group= and sync_dist_group="
            )


def operation(reduce_op: Any) -> str:
    """Returns "mean", "sum", "min" or "max" for one of Lightning's names or `torch.distributed.ReduceOp`."""
    return str(getattr(reduce_op, "name", reduce_op)).lower().replace("avg", "mean")


def refuse_whole(loss: Tensor) -> None:
    """Raises `ConfigError` for a loss on `hvt.whole`, which only `hvt.prepare` takes back to the model."""
    if is_whole(loss):
        raise ConfigError(
            "hvt.whole() needs a model that hvt.prepare() or a Trainer with automatic optimization trains",
            "a loss of its result in manual_backward() or fabric.backward()",
            "all_gather(values, sync_grads=True), and drop_last=True in the DataLoader",
        )


class _Gather(torch.autograd.Function):
    """All ranks' tensors, stacked; a rank's gradient is the sum of all ranks' gradients by its tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: World) -> Tensor:
        ctx.world = world
        return hvt.gather(tensor.detach().reshape(1, -1), world=world).reshape(world.size, *tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return hvt.reduce(gradient.detach(), "sum", world=ctx.world)[ctx.world.rank], None


# ---- data


class LoaderFollower:
    """Follows a loader, which then serves equally many batches on every rank, where it trains."""

    leaves, accumulate = False, 1  # as the loader asks what follows it

    saver: Any = None

    @property
    def preempted(self) -> bool:
        """Returns True if all ranks know of a preemption: the loader then ends the job before its next batch."""
        return False

    def handed_out(self, step: Step | None, batch: Any = None) -> None:
        """There is nothing to note."""


@dataclass(frozen=True)
class Deal:
    """A data loader's samples, dealt to the ranks.

    Attributes:
        loader: hvdtrain's loader of them.
        steps: of an epoch.
        last: samples of all ranks in an epoch's last step.
    """

    loader: hvt.Loader
    steps: int
    last: int


def deal(data: Any, world: World, *, trains: bool) -> Deal:
    """Deals the samples of a `DataLoader` to the ranks; collective. Takes hvdtrain's own loaders as they are."""
    if isinstance(data, hvt.Loader):
        return Deal(data, data.plan.steps(), data.plan.samples % data.global_batch or data.global_batch)
    rule, fix = (
        "data must be a DataLoader of samples that can be dealt to the ranks",
        "DataLoader(dataset, batch_size=8)",
    )
    if not isinstance(data, torch_data.DataLoader):
        raise ConfigError(rule, f"a {type(data).__name__}", fix)
    batches: Any = data.batch_sampler
    batch, drop = getattr(batches, "batch_size", data.batch_size), trains and getattr(batches, "drop_last", False)
    sampler: Any = getattr(batches, "sampler", None)
    received = ""
    if isinstance(data.dataset, torch_data.IterableDataset) or not hasattr(sampler, "__len__"):
        received = f"{type(data.dataset).__name__}, whose end is not known"
    elif batch is None or (trains and type(batches) is not torch_data.BatchSampler):
        received = f"batch_sampler={type(batches).__name__}(...)"
    elif not trains and len(sampler) < world.size:
        received = f"{len(sampler)} samples, fewer than the {world.size} ranks"
    if received:
        raise ConfigError(rule, received, fix)
    shuffles = isinstance(sampler, torch_data.RandomSampler) and not sampler.replacement
    shuffles = shuffles and len(sampler) == len(data.dataset)  # type: ignore[arg-type]
    given = None if shuffles or isinstance(sampler, torch_data.SequentialSampler) else sampler
    loader = hvt.loader(
        data.dataset, batch, world=world, shuffle=shuffles and trains, tail="drop" if drop else "weighted",
        workers=data.num_workers, collate=None if data.collate_fn is torch_data.default_collate else data.collate_fn,
        sampler=given, worker_init_fn=data.worker_init_fn, prefetch_factor=data.prefetch_factor or 2,
        seed=world.broadcast(_seed()),  # ranks may have seeds of their own
    )  # fmt: skip
    every, whole = len(sampler), loader.global_batch
    if drop:
        return Deal(loader, every // whole, whole)
    return Deal(loader, -(-every // whole), every % whole or whole)


# ---- state of modules


def join_metrics(module: nn.Module) -> None:
    """Lets the metrics of a module, or a metric, compute over all ranks' samples."""
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None:
            metric.dist_sync_fn, metric.distributed_available_fn = _of_all_ranks, _several_ranks


@contextmanager
def uncounted(modules: Iterable[nn.Module], step: Step, world: World, *, buffers: bool = True) -> Iterator[None]:
    """Restores metrics after a padding batch, and the other buffers if `buffers`."""
    parts = [part for module in modules for part in module.modules()] if step.padding and world.size > 1 else []
    metrics = [part for part in parts if isinstance(part, Metric)]
    states = [(metric, {name: _copied(value) for name, value in vars(metric).items()}) for metric in metrics]
    try:
        with kept_buffers(parts if buffers else ()):
            yield
    finally:
        for metric, state in states:
            vars(metric).update(state)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else list(value) if type(value) is list else value


def _of_all_ranks(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Returns each rank's state of a metric, of any shape; collective."""
    world = hvdtrain.current() or World.solo()
    return [its.to(tensor.device) for its in world.gather(tensor.detach().cpu())]


def _several_ranks() -> bool:
    world = hvdtrain.current()
    return world is not None and world.size > 1
