"""Eight models are prepared, trained and dropped: nothing of them may be left; usage: leaks.py ENGINE"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import hvdtrain
import hvdtrain.torch as hvt

MODELS, WARM_UP, WIDTH = 8, 4, 1024  # 4 MiB of weights each
MOST_MIB = 20


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((WIDTH,), 0.01 * index), torch.zeros(WIDTH)


def fold(world: hvdtrain.World, number: int) -> list[weakref.ref[Any]]:
    """Trains one model, and returns what must be gone soon."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    train = hvt.loader(Samples(), 4, world=world, workers=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    sync = world.engine != "solo" and number % 2 == 0
    model, prepared = hvt.prepare(module, optimizer, train, verify=number == 0, sync_batchnorm=sync, clip=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(prepared, 2) if number % 2 else None
    for _ in range(2):
        for x, y in train:
            prepared.zero_grad()
            prepared.backward(mse_loss(model(x), y))
            prepared.step()
        if scheduler is not None:
            scheduler.step()
    hvt.evaluate(
        model, (torch.zeros(8, WIDTH), torch.zeros(8, WIDTH)), lambda out, y: {"m": out.mean(1)}, per_rank_batch=4
    )
    for part in hvt.model_state(model, prepared).values():
        part.collect()
    return [weakref.ref(thing) for thing in (module, optimizer, prepared, train, model)]


def left() -> tuple[int, int]:
    """Processes and threads of this rank."""
    return len(psutil.Process().children(recursive=True)), threading.active_count()


class Mallinfo2(ctypes.Structure):
    """What glibc's malloc says of itself (mallinfo2(3)); `fordblks`: bytes that it holds and nobody uses."""

    NAMES = (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )  # fmt: skip
    _fields_ = tuple((name, ctypes.c_size_t) for name in NAMES)


def held_mib() -> float:
    """Resident memory, but for what was freed and malloc keeps, which moves with the timing of threads."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Mallinfo2
    return (psutil.Process().memory_info().rss - ask().fordblks) / 2**20


def main(world: hvdtrain.World) -> int:
    before: tuple[tuple[int, int], float] = (0, 0), 0.0
    dead: list[weakref.ref[Any]] = []
    for number in range(MODELS):
        dead += fold(world, number)
        gc.collect()
        if number + 1 == WARM_UP:
            before = left(), held_mib()
    alive = [type(thing()).__name__ for thing in dead if thing() is not None]
    processes, grown = left(), held_mib() - before[1]
    workers = [
        child
        for child in psutil.Process().children(recursive=True)
        if "resource_tracker" not in " ".join(child.cmdline())
    ]
    wrong = bool(alive or workers or processes != before[0] or grown > MOST_MIB)
    found = world.gather(
        f"alive {alive}, processes and threads {before[0]} -> {processes}, workers {len(workers)}, {grown:+.1f} MiB"
    )
    if world.is_main:
        print("\n".join(found), flush=True)
    return int(any(world.gather(wrong)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with hvdtrain.init("torch", engine=sys.argv[1], device="cpu", seed=5) as the_world:
        failed = main(the_world)
    sys.exit(3 if failed else 0)
