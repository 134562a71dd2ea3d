"""Horovod: its primitive operations carry the gradients; its optimizer wrapper is not used.

The wrapper sums over micro-batches where it should average, cannot weigh ranks by their samples, and negotiates every
parameter separately (see `hvdtrain.torch.engines.reducer` for the replacement).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.comm.engines import HorovodCollectives, losses_in
from hvdtrain.core import variables
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.launchers import Detected
from hvdtrain.torch.engines.base import TensorCollectives, Transport, pick_devices, step_of
from hvdtrain.torch.engines.reducer import Reducer, Wait

USUAL_BUCKET_BYTES = {"cpu": 5 << 20, "cuda": 25 << 20}  # on a CPU: sent while it is still in a cache


def attach(detected: Detected, *, device: str, gpus_per_rank: int) -> HorovodEngine:
    import horovod.torch as hvd

    devices = pick_devices(detected, device, gpus_per_rank)
    # read once, when Horovod starts: buckets are fused already, and fused again each gradient is copied twice more
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    return HorovodEngine.join(hvd, detected, devices)


# What Horovod 0.28.1 can add up; other types travel as these.
_SUMMABLE = (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
_SENT_AS = {torch.bfloat16: torch.float32}


class HorovodEngine(TensorCollectives, HorovodCollectives):
    """`TorchEngine` on Horovod."""

    runs_stages = True

    def sum_(self, tensor: Tensor) -> Tensor:
        self.sum_async(tensor, self.next_name())()
        return tensor

    def broadcast_(self, tensor: Tensor, root: int = 0) -> Tensor:
        if tensor.is_inference():
            return tensor.copy_(self.broadcast_(_writable(tensor), root))
        if tensor.numel():
            sent = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            if sent.dtype not in (*_SUMMABLE, torch.uint8, torch.int8, torch.int16):  # bool, bfloat16, float8, uint16
                sent = sent.view(-1).view(torch.uint8)
            with rank_losses():
                self.hvd.synchronize(self.hvd.broadcast_async_(sent, root, name=self.next_name()))
        return tensor

    def sum_async(self, tensor: Tensor, name: str) -> Wait:
        """Starts to sum a contiguous tensor over ranks, in place; the function returned waits for it."""
        if not tensor.numel():
            return lambda: None
        if tensor.is_complex():
            return self.sum_async(torch.view_as_real(tensor), name)
        sent = tensor if tensor.dtype in _SUMMABLE else tensor.to(_SENT_AS.get(tensor.dtype, torch.int32))
        sent = _writable(sent) if sent.is_inference() else sent
        with rank_losses():
            handle = self.hvd.allreduce_async_(sent, name=name, op=self.hvd.Sum)

        def wait() -> None:
            with rank_losses():
                self.hvd.synchronize(handle)
            if sent is not tensor:
                tensor.copy_(sent)

        return wait

    def shares_memory(self) -> bool:
        """Returns True if ranks of one host add up through shared memory; all of them do, or none (docs/horovod.md)."""
        enabled = getattr(self.hvd, "shared_memory_enabled", lambda: False)  # which other Horovods lack
        return self.device.type == "cpu" and bool(enabled())

    def gather(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        """Returns the ranks' uint8 tensors end to end; bytes are not among what Horovod adds up."""
        with rank_losses(), torch.inference_mode(False):
            return self.hvd.synchronize(self.hvd.allgather_async(tensor, name=self.next_name()))

    def bind(self, module: nn.Module, optimizer: torch.optim.Optimizer, settings: Transport) -> HorovodModel:
        return HorovodModel(self, module, optimizer, settings)


def _writable(tensor: Tensor) -> Tensor:
    """Returns a copy that Horovod's thread can write: only inference mode itself can write its tensors."""
    with torch.inference_mode(False):
        return tensor.clone()


def _wanted_bytes() -> int:
    text = os.environ.get(variables.BUCKET_BYTES) or "0"
    if not text.isdecimal():
        raise ConfigError(
            f"{variables.BUCKET_BYTES} must be a whole number of bytes", repr(text), "5242880, or unset it"
        )
    return int(text)


def rank_losses() -> AbstractContextManager[None]:
    from horovod.common.exceptions import HorovodInternalError

    return losses_in(HorovodInternalError)


class HorovodModel(Reducer):
    """A model whose gradients are summed over Horovod's ranks, as they come."""

    def __init__(
        self, engine: HorovodEngine, module: nn.Module, optimizer: torch.optim.Optimizer, settings: Transport
    ) -> None:
        if settings.compression == "bf16":
            raise ConfigError("Horovod does not support bfloat16", 'compression="bf16"', 'compression="fp16", or None')
        super().__init__(
            module,
            engine.sum_async,
            bucket_bytes=settings.bucket_bytes or _wanted_bytes() or USUAL_BUCKET_BYTES[engine.device.type],
            compression=settings.compression,
            staged=settings.staged,
            where_they_lie=engine.shares_memory,
        )
        self.call: Callable[..., Any] = module
        self._optimizer = optimizer

    def step(self, closure: Callable[[], object] | None = None) -> None:
        step_of(self._optimizer, closure)
