"""Two ranks, of which rank 1 does not come to an update, or is only slow; usage: hang.py ENGINE WAY.

The lines where the rank that hangs is named to be end in "# here".
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import tempfile
import threading
import time
from types import FrameType
from typing import Any

import beacon
import moving
import torch
from torch.utils.data import DataLoader, Dataset

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain import Checkpointer, World
from hvdtrain.checkpoint.parts import Part
from hvdtrain.checkpoint.staging import StateFile

STEPS = 3


class Forever(Dataset):
    """Whose third sample never comes, on rank 1."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __len__(self) -> int:
        return STEPS + 1

    def __getitem__(self, index: int) -> torch.Tensor:
        while self._rank == 1 and index == 2:
            time.sleep(0.01)
        return torch.ones(3)


class Training:
    """A model, and updates of it."""

    def __init__(self, *, verify: bool = False) -> None:
        model = torch.nn.Linear(3, 2)
        self.model, self.optimizer = hvt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), verify=verify)

    def update(self, x: torch.Tensor | None = None) -> None:
        self.optimizer.backward(self.model(torch.ones(4, 3) if x is None else x).square().mean())  # waits
        self.optimizer.step()


def endless_loop(world: World, training: Training) -> None:
    while world.rank == 1:  # here
        pass  # here


def lock(world: World, training: Training) -> None:
    mine = threading.Lock()
    if world.rank == 1:
        mine.acquire()
        mine.acquire()  # here


def waits_for_a_thread(world: World, training: Training) -> None:
    if world.rank == 1:
        while True:  # here
            try:  # here
                queue.Queue().get(timeout=0.2)  # here
            except queue.Empty:  # here
                continue  # here


def fails_with_a_thread(world: World, training: Training) -> None:
    if world.rank == 1:
        threading.Thread(target=threading.Event().wait).start()
        raise ValueError("boom")


def data_worker(world: World, training: Training) -> None:
    for x in DataLoader(Forever(world.rank), num_workers=1):  # here
        training.update(x)


def stopped(world: World, training: Training) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def sleeps(world: World, training: Training) -> None:
    if world.rank == 1:
        time.sleep(10**6)  # here


def sleeps_12_s(world: World, training: Training) -> None:
    if world.rank == 1:
        time.sleep(12)  # here


def hook(world: World, training: Training) -> None:
    """In the backward pass, which is noted to be the update."""

    def never_ends(gradient: torch.Tensor) -> None:
        while world.rank == 1:  # here
            time.sleep(0.01)  # here

    x = torch.ones(4, 3)
    outputs = training.model(x)
    outputs.register_hook(never_ends)
    training.optimizer.backward(outputs.square().mean())


def skips_evaluate(world: World, training: Training) -> None:
    if world.is_main:
        data = torch.utils.data.TensorDataset(torch.ones(8, 3), torch.zeros(8, dtype=torch.long))
        hvt.evaluate(training.model, data, hvt.classification(top=(1,)), per_rank_batch=4)  # waits
    while world.rank == 1:  # here
        time.sleep(0.1)  # here


# -- nothing is wrong ----------------------------------------------------------------------------------------------
def long_checkpoint(world: World, training: Training) -> None:
    class Slow(Part):
        def write(self, file: StateFile) -> None:
            time.sleep(9)

    Checkpointer(tempfile.mkdtemp()).save({"slow": Slow()}, progress=training.optimizer.progress)


def traced(world: World, training: Training) -> None:
    """As at a breakpoint."""

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        return trace

    def at_a_breakpoint() -> None:
        time.sleep(9)

    if world.rank == 1:
        sys.settrace(trace)
        at_a_breakpoint()
        sys.settrace(None)


def preprocesses(world: World, training: Training) -> None:
    if world.rank == 1:
        moving.work(9)


def computes_long(world: World, training: Training) -> None:
    """In circles, for longer than a rank that stands still would get."""
    until = time.monotonic() + 9
    while world.rank == 1 and time.monotonic() < until:
        for function in (moving.first, moving.second, moving.third):
            function(0.11)


def main() -> None:
    engine, way = sys.argv[1:]
    torch.set_num_threads(1)
    beacon.start()
    with hvdtrain.init("torch", engine=engine, device="cpu") as world:
        slow = way == "slow_first_step" and world.rank == 1  # what is tried; nothing waits for it by sleeping
        time.sleep(9 * slow)
        training = Training(verify=way == "slow_first_step")  # whose trial update is not the first one
        time.sleep(9 * slow)
        for _ in range(2):
            training.update()
        beacon.parts()
        globals().get(way, lambda *_: None)(world, training)
        training.update()
    print("done", flush=True)


if __name__ == "__main__":
    main()
