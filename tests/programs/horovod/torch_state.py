"""Horovod for PyTorch, as the recipe's wheel has it: started anew many times, then an optimizer that is broadcast, new
on every rank or with rank 0's state, against plain PyTorch of one process, in float64.

usage: torch_state.py FOLDER
"""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import horovod.torch as hvd
import torch
from horovod.runner.http.http_server import RendezvousServer

STARTS = 20
Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "Adam": partial(torch.optim.Adam, lr=0.1),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.01, weight_decay=0.1),
}
X = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)


def made(make: Make) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    return model, make(model.parameters())


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(x) ** 2).mean().backward()
    optimizer.step()


def gap(make: Make, resumed: bool, send_it: bool = True) -> float:
    """A step of all ranks, after one of rank 0 alone where it `resumed`, from one of plain PyTorch."""
    model, optimizer = made(make)
    if resumed and hvd.rank() == 0:
        step(model, optimizer, X)
    ours = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    ours.load_state_dict(optimizer.state_dict())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if send_it:
        hvd.broadcast_optimizer_state(ours, root_rank=0)
    step(model, ours, X[hvd.rank() :: hvd.size()])
    plain, alone = made(make)
    for _ in range(2 if resumed else 1):
        step(plain, alone, X)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def forgotten() -> list[int]:
    """Whether an address is there before and after all ranks of a group have met. Rank 0, alone in its group across
    hosts, ends that one before rank 1 has ended the group of their host."""
    server = RendezvousServer()
    port = server.start()
    slots = [SimpleNamespace(hostname="here", size=2, local_size=2, cross_size=1, local_rank=rank) for rank in (0, 1)]
    server.init(slots)

    def answer(method: str, what: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request(method, f"/{what}", b"address")
        status = connection.getresponse().status
        connection.close()
        return status

    for key in ("local_here/0", "local_here/1", "cross_0/0"):
        answer("PUT", key)
    found = [answer("GET", "local_here/1")]
    for key in ("local_here/0", "cross_0/0", "local_here/1"):
        answer("DELETE", key)
    found += [answer("GET", f"local_here/{rank}") for rank in (0, 1)]
    server.stop()
    return found


def main(folder: Path) -> None:
    for _ in range(STARTS):
        hvd.init()
        assert hvd.allreduce(torch.ones(1), name="met", op=hvd.Sum).item() == hvd.size()
        hvd.shutdown()
    hvd.init()
    found: dict[str, Any] = {"forgotten": forgotten()}
    found |= {f"{name}, new": gap(make, False) for name, make in OPTIMIZERS.items()}
    found |= {f"{name}, resumed": gap(make, True) for name, make in OPTIMIZERS.items()}
    found["not sent"] = gap(OPTIMIZERS["SGD with momentum"], True, send_it=False)
    (folder / f"{hvd.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
