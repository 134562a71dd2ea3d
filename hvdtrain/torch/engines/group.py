"""Ranks joined by torch.distributed: Gloo carries tensors in main memory, NCCL those on GPUs."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hvdtrain.core.errors import HvdtrainError, LauncherError
from hvdtrain.core.in_step.arrival import attempts, timeout_s, wait_for_all
from hvdtrain.core.launchers import Detected, meeting_point
from hvdtrain.torch.engines.base import EngineModel, Settings, TensorCollectives, pick_devices

# what Gloo cannot add up
_WIDENED = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_joins = itertools.count()  # of this process; every rank joins as often, so the numbers match


@dataclass(kw_only=True)
class GroupEngine(TensorCollectives):
    """`TorchEngine` on torch.distributed; `model` is what has the gradients summed."""

    model: Callable[[GroupEngine, nn.Module, torch.optim.Optimizer, Settings], EngineModel] = field(repr=False)
    # Gradients travel on the default group. What is in main memory has one of its own: in a backward pass the two kinds
    # may start in different orders on different ranks, where a branch of the model gives a rank no gradient.
    host_group: Any = field(repr=False)
    runs_stages = False
    _models: WeakSet[EngineModel] = field(default_factory=WeakSet, repr=False)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sums a contiguous tensor over ranks, in place; bool as "any"."""
        if not tensor.numel():
            return tensor
        wide = tensor.to(_WIDENED[tensor.dtype]) if tensor.dtype in _WIDENED else tensor
        with rank_losses():
            dist.all_reduce(wide, group=self._group_of(tensor))
        return tensor if wide is tensor else tensor.copy_(wide)

    def broadcast_(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Gives every rank root's contiguous tensor, in place."""
        if tensor.numel():
            with rank_losses():  # as bytes: any type of number goes
                dist.broadcast(tensor.detach().view(-1).view(torch.uint8), root, group=self._group_of(tensor))
        return tensor

    def _group_of(self, tensor: Tensor) -> Any:
        return self.host_group if tensor.device.type == "cpu" else None

    def bind(self, module: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings) -> EngineModel:
        model = self.model(self, module, optimizer, settings)
        self._models.add(model)  # to be closed before the group ends, if it is still in use
        return model

    def shutdown(self) -> None:
        self.barrier()  # rank 0 holds the store that the others still use
        # whatever still refers to the group when the interpreter ends would end its threads too late, in an abort
        for model in list(self._models):
            model.close()
        self._models.clear()
        self.host_group = None
        dist.destroy_process_group()


def join(
    name: str, model: Callable[..., EngineModel], detected: Detected, *, device: str, gpus_per_rank: int
) -> GroupEngine:
    """Joins the ranks.

    Raises:
        ConfigError, LauncherError: no such GPU; the place to meet is not known, taken, or out of reach; ranks missing.
    """
    devices = pick_devices(detected, device, gpus_per_rank)
    backend = "cpu:gloo,cuda:nccl" if devices and dist.is_nccl_available() else "gloo"
    store = _meet(detected)
    with _as_launcher_error("the ranks must reach each other", "check that hosts resolve and reach each other's names; "
                            "name the network with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"):  # fmt: skip
        dist.init_process_group(backend, store=store, rank=detected.rank, world_size=detected.size)
        host_group = dist.new_group(backend="gloo") if detected.size > 1 else None
    return GroupEngine(
        name=name, model=model, rank=detected.rank, size=detected.size, local_rank=detected.local_rank,
        local_size=detected.local_size, node=detected.node, devices=devices, host_group=host_group,
    )  # fmt: skip


def _meet(detected: Detected) -> dist.Store:
    """Returns the store all ranks share, when all have come."""
    if detected.size == 1:
        return dist.HashStore()
    host, port = meeting_point(os.environ, detected)
    seconds = timeout_s(os.environ)
    # under torchrun its agent holds the store, else rank 0 (torch.distributed.rendezvous decides alike)
    listens = detected.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    with _as_launcher_error(
        f"rank {detected.rank} must be able to {'listen on' if listens else 'reach rank 0 at'} {host}:{port}",
        "check that the host is the one of rank 0, that its port is free and no firewall is between; another port:"
        " MASTER_PORT (torchrun: --master-port)",
    ):
        if not listens:
            _wait_for_port(host, port, seconds)
        limit = timedelta(seconds=seconds)
        found = dist.TCPStore(
            host, port, detected.size, listens, timeout=limit, wait_for_workers=False, multi_tenant=True
        )
    store = dist.PrefixStore(f"hvdtrain.{next(_joins)}", found)
    wait_for_all(store, detected.rank, detected.size, seconds)
    return store


def _wait_for_port(host: str, port: int, seconds: float) -> None:
    """Returns when somebody listens there; PyTorch's store, waiting itself, would print stacks of C++ at each try.

    Raises:
        OSError: the last attempt's; names that do not resolve are tried again too, clusters are slow to know theirs.
    """
    for remaining in attempts(seconds):
        try:
            socket.create_connection((host, port), timeout=max(remaining, 0.1)).close()
            return
        except OSError:
            if remaining <= 0:
                raise


@contextmanager
def _as_launcher_error(rule: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, HvdtrainError):
            raise
        raise LauncherError(rule, str(error).splitlines()[0], remedy) from error


@contextmanager
def rank_losses() -> Iterator[None]:
    """Says what it means when the group breaks under a collective."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error).lower():
            raise HvdtrainError(
                "every rank must take part until the end",
                f"torch.distributed gave up: {str(error).splitlines()[0]}",
                "read what the rank that ended first has said",
            ) from error
        raise
