"""Two ranks that train and save after every update, killed at random instants, until they are through.

Usage: killed_at_random.py FOLDER KILLS. One rank or both are killed by SIGKILL, and now and then the
process that writes as well; the next attempt goes on from the newest checkpoint. Ends with the weights of an unbroken
run, bit for bit, or fails.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import torch
from torch import nn

import hvdtrain
import hvdtrain.torch as hvt

FOLDER, KILLS = Path(sys.argv[1]), int(sys.argv[2])
SAMPLES, BATCH, EPOCHS = 64, 4, 2
WIDTH = 300  # 300 kB of weights, 1 MB with Adam's moments
DRAWN = random.Random(7)


def train(rank: int, port: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "x"}  # fmt: skip
    world = hvdtrain.init("torch", engine="ddp", seed=1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 8, generator=generator)
    data = hvt.loader((x, x.sum(1, keepdim=True)), BATCH)
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    model, optimizer = hvt.prepare(model, torch.optim.Adam(model.parameters(), 1e-3), data)
    checkpoints = hvdtrain.Checkpointer(folder / "checkpoints", best=None, keep=2)
    state = hvt.model_state(model, optimizer, data)
    checkpoints.restore(state)
    for _ in data.epochs(EPOCHS):
        for inputs, targets in data:
            optimizer.zero_grad()
            optimizer.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            checkpoints.save(state, progress=optimizer.progress)
    checkpoints.wait()
    if world.is_main:
        torch.save(model.state_dict(), folder / "end.part")
        os.rename(folder / "end.part", folder / "end.pt")
    world.barrier()


def fork(folder: Path) -> list[psutil.Process]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                train(rank, port, folder)
                code = 0
            except Exception as error:
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            hvdtrain.core.errors.end_now(code)
        ranks.append(psutil.Process(pid))
    return ranks


def attempt(folder: Path, after_s: float) -> tuple[bool, list[int]]:
    """Run until it ends, or is killed; return whether it was, and the ranks' exit codes."""
    ranks = fork(folder)
    ended, alive = psutil.wait_procs(ranks, timeout=after_s)
    killed = len(alive) == 2
    if killed:
        doomed = DRAWN.choice([ranks[:1], ranks[1:], ranks])
        if DRAWN.random() < 0.3:
            doomed = [*doomed, *(child for rank in ranks for child in children_of(rank))]
        for process in doomed:
            kill(process)
    _, alive = psutil.wait_procs(ranks, timeout=20 if killed else 60)
    for process in alive:
        kill(process)
    psutil.wait_procs(ranks)
    return killed, [rank.wait() for rank in ranks]


def children_of(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.NoSuchProcess:
        return []


def kill(process: psutil.Process) -> None:
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return


def main() -> None:
    unbroken = FOLDER / "unbroken"
    unbroken.mkdir()
    started = time.monotonic()
    psutil.wait_procs(fork(unbroken), timeout=120)
    whole_s = time.monotonic() - started
    wanted = torch.load(unbroken / "end.pt")
    kills = runs = attempts = 0
    while kills < KILLS:
        runs += 1
        folder = FOLDER / f"run{runs}"
        folder.mkdir()
        while not (folder / "end.pt").exists():
            attempts += 1
            last = kills >= KILLS
            killed, codes = attempt(folder, 120 if last else DRAWN.uniform(0.2, 0.8) * whole_s)
            assert killed or codes == [0, 0], f"attempt {attempts} of run {runs} failed by itself: {codes}"
            kills += killed
        found = torch.load(folder / "end.pt")
        assert all(torch.equal(found[name], value) for name, value in wanted.items()), f"run {runs} ended otherwise"
    print(f"{kills} kills, {attempts} attempts, {runs} runs, all bit-equal", flush=True)


if __name__ == "__main__":
    main()
