"""A training that something befalls, and that notes every sample: train.py FOLDER LIFE PACE_S [FAULT].

FOLDER holds its checkpoints, its run, and a ledger of each process; LIFE counts the jobs that trained in it. FAULT, one
of `FAULTS`, befalls one rank, once (FOLDER/fault says when); others come from outside. Until FOLDER/finish is there an
update takes PACE_S more. The model, its data and the rate are those of tests/support/ledger.py, which judges them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from ledger import BASE, MOMENTUM, REFERENCE, first_weights, rows_of
from torch import nn

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.comm import elastic
from hvdtrain.core import launchers

SAMPLES, EPOCHS, PER_RANK, EVERY = 403, 2, 4, 10
AT = 13  # the update that a fault comes with
folder, life, pace_s, fault = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), [*sys.argv[4:], ""][0]


def begins() -> bool:
    """Is this the time? Notes it, once for all lives."""
    try:
        with (folder / "fault").open("x") as file:
            file.write(str(time.monotonic()))  # the same clock on all hosts of this machine
    except FileExistsError:
        return False
    return True


class Rows(torch.utils.data.Dataset):
    """Of numbered samples; `rank` reads them."""

    def __init__(self, rank: int) -> None:
        self._rank, self._reader, self._read = rank, os.getpid(), 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self._read += 1
        late = self._read > AT * PER_RANK and os.getpid() != self._reader  # in a worker
        if fault in ("worker_loops", "worker_killed") and self._rank == 1 and late and begins():
            if fault == "worker_killed":
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                pass
        x, y = rows_of([index])
        return x[0], y[0]


def raises(world: hvdtrain.World) -> None:
    raise ValueError("no sense in this sample")


def exits(world: hvdtrain.World) -> None:
    sys.exit(3)


def killed(world: hvdtrain.World) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(world: hvdtrain.World) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def segfault(world: hvdtrain.World) -> None:
    ctypes.string_at(0)


def deadlock(world: hvdtrain.World) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def loops(world: hvdtrain.World) -> None:
    while True:
        pass


def hog(world: hvdtrain.World) -> None:
    """Takes memory until there is none; whoever limits it has made FOLDER/hog."""
    while not (folder / "hog").exists():
        time.sleep(0.01)
    taken = []
    while True:
        taken.append(b"x" * (8 << 20))


def told(world: hvdtrain.World) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


# whom a fault befalls, at update AT; rank 1 where nothing is said
FAULTS = {f.__name__: f for f in (raises, exits, killed, stopped, segfault, deadlock, loops, hog, told)}


def befalls(world: hvdtrain.World, update: int) -> None:
    """What happens before the backward pass of an update."""
    if update != AT or life > 1 or launchers.restarts(os.environ):
        return
    if fault in FAULTS and world.rank == 1 and begins():
        FAULTS[fault](world)
    if fault == "skips" and world.rank == 0 and begins():
        world.gather("only rank 0 comes")
    if fault == "order":
        if world.rank == 1:
            begins()
            world.gather("first")
        world.barrier()
        if world.rank == 0:
            world.gather("second")


def model_of() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), first_weights(), strict=True):
            parameter.copy_(torch.from_numpy(value.T))
    return model


def main() -> None:
    torch.set_num_threads(1)
    with ExitStack() as stack, hvdtrain.init("torch", seed=1, device="cpu") as world:
        data = hvt.loader(Rows(world.rank), PER_RANK, workers=1 if "worker" in fault else 0)
        model = model_of()
        plain = torch.optim.SGD(model.parameters(), BASE, momentum=MOMENTUM)
        rate = hvdtrain.LR(BASE, REFERENCE, scale="sqrt", warmup_samples=SAMPLES // 2)
        model, optimizer = hvt.prepare(model, plain, data, lr=rate)
        resume = world.on_main((folder / "run" / "run.json").exists)
        run = stack.enter_context(hvdtrain.RunLog(folder / "run", world, config={}, resume=resume, tensorboard=False))
        checkpoints = hvdtrain.Checkpointer(folder / "checkpoints", best=None, keep=2)
        state = hvt.model_state(model, optimizer)
        checkpoints.on_preemption(state)
        checkpoints.restore(state)
        name = f"ledger.{life}.{launchers.restarts(os.environ)}.{os.getpid()}.{world.rank}"
        ledger = stack.enter_context((folder / name).open("w", buffering=1))

        def note(kind: str, update: int, **more: Any) -> None:
            line = elastic.line()
            found = {"kind": kind, "update": update, "formation": line.formation if line else 0, **more}
            print(json.dumps({**found, "at_s": time.monotonic()}), file=ledger)

        note("began", optimizer.progress.step, pid=os.getpid())
        for epoch in data.epochs(EPOCHS):
            for x, y in data:
                before = optimizer.progress.step
                ids = [] if data.step.padding else x[:, 0].int().tolist()
                note("took", before + 1, epoch=epoch, ids=ids)
                if not (folder / "finish").exists():
                    time.sleep(pace_s)
                befalls(world, before + 1)
                loss = nn.functional.mse_loss(model(x[:, 1:]), y)
                if fault == "nan" and world.rank == 1 and before + 1 == AT and begins():
                    loss = loss * float("nan")
                optimizer.zero_grad()
                optimizer.backward(loss)
                optimizer.step()
                done = optimizer.progress.step
                if done == before:
                    continue
                note("applied", done, lr=optimizer.param_groups[0]["lr"])
                run.step(**optimizer.record())
                if done % EVERY == 0:
                    checkpoints.save(state, progress=optimizer.progress)
                if fault == "short" and world.rank == 1 and done == -(-SAMPLES // data.global_batch) - 1 and begins():
                    break  # as a loop that has a batch fewer
        checkpoints.save(state, progress=optimizer.progress)
        if world.is_main:
            weights = [parameter.detach().numpy().T.tolist() for parameter in model.parameters()]
            (folder / "weights.json").write_text(json.dumps(weights))
    print("trained", flush=True)


if __name__ == "__main__":
    main()
