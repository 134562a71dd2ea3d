"""Ranks joined by torch.distributed: Gloo carries tensors in main memory, NCCL those on GPUs."""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hvdtrain.comm.arrival import Rendezvous, attempts, listen_to_ranks, timeout_s, wait_for_all
from hvdtrain.comm.engines import losses_in
from hvdtrain.core.errors import HvdtrainError, LauncherError
from hvdtrain.core.launchers import Detected, meeting_point
from hvdtrain.torch.engines.base import EngineModel, TensorCollectives, Transport, pick_devices

# what Gloo cannot add up
_WIDENED = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_CONNECT_S = 5.0  # of rank 0's addresses one may lead nowhere
_joins = itertools.count()  # of this process; every rank joins as often, so the numbers match


@dataclass(kw_only=True)
class GroupEngine(TensorCollectives):
    """`TorchEngine` on torch.distributed; `model` is what has the gradients summed."""

    model: Callable[[GroupEngine, nn.Module, torch.optim.Optimizer, Transport], EngineModel] = field(repr=False)
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
        if tensor.numel():
            with rank_losses():  # as bytes: any type of number goes
                dist.broadcast(tensor.detach().view(-1).view(torch.uint8), root, group=self._group_of(tensor))
        return tensor

    def gather(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        """Returns the ranks' uint8 tensors end to end; torch.distributed gathers what is of one length."""
        most = max(counts)
        sent = tensor if len(tensor) == most else torch.cat([tensor, tensor.new_zeros(most - len(tensor))])
        every = [torch.empty_like(sent) for _ in counts]
        with rank_losses():
            dist.all_gather(every, sent, group=self._group_of(tensor))
        return torch.cat([its[:count] for its, count in zip(every, counts, strict=True)])

    def _group_of(self, tensor: Tensor) -> Any:
        return self.host_group if tensor.device.type == "cpu" else None

    def bind(self, module: nn.Module, optimizer: torch.optim.Optimizer, settings: Transport) -> EngineModel:
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
    """Joins the ranks. Raises `ConfigError` or `LauncherError` for no such GPU, ranks that are missing, or a place
    to meet that is not known, taken, or out of reach."""
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
    number, seconds = next(_joins), timeout_s(os.environ)
    hosts, port, listener = _place(detected, number, seconds)
    # under torchrun its agent holds the store, else rank 0 (torch.distributed.rendezvous decides alike)
    listens = detected.rank == 0 and (listener or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")
    shown = " or ".join(f"{host}:{port}" for host in hosts)
    with _as_launcher_error(
        f"rank {detected.rank} must be able to {'listen on' if listens else 'reach rank 0 at'} {shown}",
        "check that the host is the one of rank 0, that its port is free and no firewall is between; another port:"
        " MASTER_PORT (torchrun: --master-port)",
    ):
        found = dist.TCPStore(
            hosts[0] if listens else _wait_for_port(hosts, port, seconds), port, detected.size, bool(listens),
            timeout=timedelta(seconds=seconds), wait_for_workers=False, multi_tenant=True,
            master_listen_fd=listener.detach() if listener else None,
        )  # fmt: skip
    # torchrun's agent keeps its store when it starts the ranks again: what an earlier attempt left is not this one's
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"hvdtrain.{attempt}.{number}", found)
    wait_for_all(store, detected.rank, detected.size, seconds)
    return store


def _place(detected: Detected, number: int, seconds: float) -> tuple[list[str], int, socket.socket | None]:
    """Returns the names rank 0 may be reached by, and its port; on rank 0 its socket, where the port is not given."""
    point, listener = meeting_point(os.environ, detected, join=number), None
    if not isinstance(point, str):
        return [point[0]], point[1], None
    assert detected.rendezvous is not None
    store = Rendezvous(detected.rendezvous, scope=f"hvdtrain.{number}")
    if detected.rank == 0:
        with _as_launcher_error("rank 0 must be able to listen", "name its network: GLOO_SOCKET_IFNAME"):
            listener, addresses = listen_to_ranks(detected, os.environ)
        store.set("place", json.dumps([addresses, listener.getsockname()[1]]))
    wait_for_all(store, detected.rank, detected.size, seconds)
    hosts, port = json.loads(store.get("place") or "")
    return hosts, port, listener


def _wait_for_port(hosts: list[str], port: int, seconds: float) -> str:
    """Returns the host that listens there; PyTorch's store, waiting itself, would print stacks of C++ at each try.
    Raises the last attempt's `OSError`; names that do not resolve are tried again, clusters are slow to know theirs."""
    problem = OSError("rank 0 knows no address of its own")
    for remaining in attempts(seconds):
        for host in hosts:
            try:
                socket.create_connection((host, port), timeout=max(min(remaining, _CONNECT_S), 0.1)).close()
                return host
            except OSError as error:
                problem = error
    raise problem


@contextmanager
def _as_launcher_error(rule: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, HvdtrainError):
            raise
        raise LauncherError(rule, str(error).splitlines()[0], remedy) from error


def rank_losses() -> AbstractContextManager[None]:
    """Raises `RanksLost` in place of the error by which torch.distributed gives up."""

    def is_its_own(error: Exception) -> bool:
        return isinstance(error, dist.DistError) or "gloo" in str(error).lower()

    return losses_in(RuntimeError, told_by=is_its_own, who="torch.distributed")
