"""Ranks that share a GPU: NCCL refuses two of them on one, so what they send travels in main memory, over Gloo.

For the checks alone. torch.distributed's Gloo takes CUDA tensors as they are; Horovod chooses by where a tensor lies,
so its operations are given copies, and results go back to where they belong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

IN_PLACE = ("allreduce_async_", "grouped_allreduce_async_", "broadcast_async_")
NEW = ("allreduce_async", "allgather_async")


def through_main_memory(engine: str) -> None:
    """Makes an engine of this process do so; before it starts."""
    if engine == "ddp":
        dist.is_nccl_available = lambda: False
        return
    import horovod.torch as hvd
    from horovod.torch import mpi_ops

    pending: dict[int, list[torch.Tensor]] = {}
    changed = {name: _staged(getattr(mpi_ops, name), pending) for name in (*IN_PLACE, *NEW)}
    changed["synchronize"] = _returned(mpi_ops.synchronize, pending)
    for module in (hvd, mpi_ops):  # what it exports, and what its own functions call
        for name, function in changed.items():
            setattr(module, name, function)


def _staged(start: Callable[..., int], pending: dict[int, list[torch.Tensor]]) -> Callable[..., int]:
    """The operation on copies in main memory; `pending`: by handle, the tensors that were given."""

    @functools.wraps(start)
    def on_copies(tensors: Any, *args: Any, **options: Any) -> int:
        given = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        copies = [tensor.detach().to("cpu", copy=True) for tensor in given]
        handle = start(copies if isinstance(tensors, (list, tuple)) else copies[0], *args, **options)
        pending[handle] = given if start.__name__ in IN_PLACE else [tensor.new_empty(0) for tensor in given]
        return handle

    return on_copies


def _returned(finish: Callable[[int], Any], pending: dict[int, list[torch.Tensor]]) -> Callable[[int], Any]:
    @functools.wraps(finish)
    def synchronize(handle: int) -> Any:
        result, given = finish(handle), pending.pop(handle, None)
        if given is None:
            return result
        several = isinstance(result, (list, tuple))
        pairs = zip(given, result if several else [result], strict=True)
        back = [_back(tensor, copy) for tensor, copy in pairs]
        return back if several else back[0]

    return synchronize


def _back(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """The result where it belongs: in the tensor that was given, or (an empty one) beside it."""
    with torch.no_grad():
        return tensor.copy_(copy) if tensor.shape == copy.shape else copy.to(tensor.device)
