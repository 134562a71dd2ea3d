"""PyTorch's DistributedDataParallel carries the gradients; under torchrun, OpenPAI, Slurm or MPI's launchers."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.launchers import Detected
from hvdtrain.private.torch import execution_engine
from hvdtrain.torch.engines.base import HALVES, Pass, Transport, step_of
from hvdtrain.torch.engines.group import GroupEngine, join, rank_losses
from hvdtrain.torch.engines.reducer import Reducer, Wait
from hvdtrain.torch.engines.shell import trainable, trains_others
from hvdtrain.torch.values.clock import CLOCK
from hvdtrain.world.startup import stderr_to

_BUCKET_BYTES = 25 << 20
# PyTorch 2.14 renamed broadcast_buffers
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_WITHOUT_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


def attach(detected: Detected, *, device: str, gpus_per_rank: int) -> GroupEngine:
    """Joins the ranks of torch.distributed."""
    return join("ddp", DdpModel, detected, device=device, gpus_per_rank=gpus_per_rank)


class DdpModel:
    """A model whose gradients DistributedDataParallel reduces.

    The user's forward pass goes through the model itself, and the loss through DDP just before its backward pass. So
    DDP learns from the loss's graph which parameters take part, a forward pass without a backward pass does no harm,
    and a pass is the update's last when that is known, not before the forward pass as with `no_sync`. The price: a
    model compiled as a whole gets no graph breaks at DDP's buckets.
    """

    def __init__(
        self, engine: GroupEngine, module: nn.Module, optimizer: torch.optim.Optimizer, settings: Transport
    ) -> None:
        self.call: Callable[..., Any] = module
        self._module = module
        self._optimizer = optimizer
        self._settings = settings
        self._extras_work: dist.Work | None = None
        self._reducer: Reducer | None = None
        self._afterwards: bool | None = None
        self._device = engine.device
        self._ddp: nn.Module | None = None
        _silence_ddp_warning()
        self._wrap()

    def _wrap(self) -> None:
        self._trainable = trainable(self._module)
        self._drop()  # before the next one sets its hooks
        ddp = DistributedDataParallel(
            _LossCarrier(self._module),
            **_WITHOUT_BUFFERS,
            init_sync=False,  # parameters are compared and broadcast already
            bucket_cap_mb=(self._settings.bucket_bytes or _BUCKET_BYTES) / (1 << 20),
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
        )
        compression = self._settings.compression
        ddp.register_comm_hook(HALVES[compression] if compression else None, _sum)
        self._ddp = ddp

    def backward(self, loss: Tensor, sent: Pass) -> None:
        if not sent.reduce:
            loss.backward(retain_graph=sent.retain_graph)  # DDP's hooks expect nothing: gradients add up here
            return
        if self._agreed(sent.afterwards):
            self._reduce_afterwards(loss, sent)
            return
        if trains_others(self._module, self._trainable):
            self._wrap()  # DDP knows only what was trainable when it was made
        assert self._ddp is not None, "closed"
        with rank_losses():
            if sent.extras is not None:
                self._extras_work = dist.all_reduce(sent.extras, async_op=True)
            carried = self._ddp(loss)
            carried.register_hook(_when_the_graph_is_done)
            _once(carried, sent.retain_graph)

    def _agreed(self, afterwards: bool | None) -> bool:
        """Returns True if a part of the model is recomputed on some rank: then all send their gradients alike."""
        if afterwards is not None and self._afterwards is None:
            some = torch.tensor([float(afterwards)], device=self._device)
            with rank_losses():
                dist.all_reduce(some)
            self._afterwards = bool(some > 0)
        return bool(self._afterwards)

    def _reduce_afterwards(self, loss: Tensor, sent: Pass) -> None:
        """DDP does not see what is recomputed within the pass, and takes it for unused: so without DDP."""
        if self._reducer is None:
            self.close()
            size = self._settings.bucket_bytes or _BUCKET_BYTES
            self._reducer = Reducer(self._module, _sum_async, bucket_bytes=size, compression=self._settings.compression)
        self._reducer.backward(loss, replace(sent, afterwards=True))

    def finish(self) -> None:
        """See `EngineModel.finish`; gradients are there already, DDP's backward pass waits for them."""
        with rank_losses():
            if self._reducer is not None:
                self._reducer.finish()
            if self._extras_work is not None:
                self._extras_work.wait()
        self._extras_work = None

    def step(self, closure: Callable[[], object] | None = None) -> None:
        step_of(self._optimizer, closure)

    def close(self) -> None:
        """Ends DDP: its reducer takes its hooks off the parameters when nothing refers to it any more."""
        self._drop()
        if self._reducer is not None:
            self._reducer.close()

    def _drop(self) -> None:
        if self._ddp is not None:
            vars(self._ddp).clear()  # at once, circles or not; the group too, which must not outlive `shutdown`
        self._ddp = None


def _sum(wire_type: torch.dtype | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sums over ranks. Left to itself DDP divides by their number, and a loss that is multiplied with it before shows
    every gradient hook another gradient than one process does."""
    buffer = bucket.buffer()
    sent = buffer if wire_type is None else buffer.to(wire_type)
    work = dist.all_reduce(sent, async_op=True).get_future()
    return work.then(lambda done: buffer if sent is buffer else buffer.copy_(done.value()[0]))


# DDP looks at these, and takes no strings
_sum.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


def _sum_async(tensor: Tensor, name: str) -> Wait:
    """Starts a sum over ranks; sums are matched by their order, which is the same on every rank."""
    with rank_losses():
        return dist.all_reduce(tensor, async_op=True).wait


def _once(loss: Tensor, retain_graph: bool) -> None:
    try:
        loss.backward(retain_graph=retain_graph)
    except RuntimeError as error:
        if "mark a variable ready only once" not in str(error) and "marked as ready twice" not in str(error):
            raise
        raise ConfigError(
            "a parameter cannot get two gradients in one backward pass",
            "a second gradient for the same parameter, after the first was sent",
            "use torch.utils.checkpoint with use_reentrant=False",
        ) from error


def _when_the_graph_is_done(grad: Tensor) -> None:
    """Lets the clock see where waiting begins: inside `backward`, when all gradients are computed. Called as the
    pass begins, so ahead of DDP in the queue of what is called at its end."""
    begin: Any = partial(CLOCK.enter, "communication")
    execution_engine.queue_callback(begin)


class _LossCarrier(nn.Module):
    """The module that DDP wraps: it has the model's parameters, and its forward pass returns the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: Tensor) -> Tensor:
        return loss


@cache
def _silence_ddp_warning() -> None:
    """Has DDP warn unheard, once for the process, that it looked for unused parameters and found none: from C++,
    past Python's filters. (With a parameter that is never used every update on a GPU would wait for the ranks'
    answer.)"""
    everything_used = DistributedDataParallel(nn.Linear(1, 1), init_sync=False, find_unused_parameters=True)
    with open(os.devnull, "wb") as nowhere, stderr_to(nowhere):
        everything_used(torch.zeros(1))
