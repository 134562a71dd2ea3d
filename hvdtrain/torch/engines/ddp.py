"""torch.distributed carries the gradients; under torchrun, OpenPAI, Slurm or MPI's launchers.

The buckets are those of `reducer`, not of PyTorch's `DistributedDataParallel`, which cannot weigh ranks by their
samples, must know before a forward pass that a pass is the update's last, and does not see what is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hvdtrain.core.launchers import Detected
from hvdtrain.torch.engines.base import Transport, step_of
from hvdtrain.torch.engines.group import GroupEngine, join, rank_losses
from hvdtrain.torch.engines.reducer import Reducer, Wait

_BUCKET_BYTES = 25 << 20


def attach(detected: Detected, *, device: str, gpus_per_rank: int) -> GroupEngine:
    """Joins the ranks of torch.distributed."""
    return join("ddp", DdpModel, detected, device=device, gpus_per_rank=gpus_per_rank)


class DdpModel(Reducer):
    """A model whose gradients are summed over the ranks of torch.distributed, as they come."""

    def __init__(
        self, engine: GroupEngine, module: nn.Module, optimizer: torch.optim.Optimizer, settings: Transport
    ) -> None:
        super().__init__(
            module,
            _sum_async,
            bucket_bytes=settings.bucket_bytes or _BUCKET_BYTES,
            compression=settings.compression,
            in_order=True,
        )
        self.call: Callable[..., Any] = module
        self._optimizer = optimizer

    def step(self, closure: Callable[[], object] | None = None) -> None:
        step_of(self._optimizer, closure)


def _sum_async(tensor: Tensor, name: str) -> Wait:
    """Starts a sum over ranks; sums are matched by their order, which is the same on every rank."""
    with rank_losses():
        work = dist.all_reduce(tensor, async_op=True)

    def wait() -> None:
        with rank_losses():
            work.wait()

    return wait
