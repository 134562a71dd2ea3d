"""Trains, and is preempted: preempted.py FOLDER [PLACE NUMBER RANK]

PLACE: "update" (after NUMBER updates), "accumulation" (after one batch more), "validation", "save" (of epoch NUMBER),
"launcher" (after NUMBER updates, by somebody else), "lost" (after NUMBER updates and a checkpoint that is lost: what
writes it is killed). RANK: which one gets the signal.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from writing import writer

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.watch import preemption

folder, place, number, who = [*sys.argv[1:], "", "0", "none"][:4]


def lose() -> None:
    """Rank 0's checkpoint of now is lost."""
    checkpoints.wait()
    if world.is_main:
        writer().suspend()
    checkpoints.save(state, progress=optimizer.progress)
    if world.is_main:
        writer().kill()


def told(now: str, count: int) -> None:
    """Is this the place? Then this rank goes on when it knows."""
    if (place, now, count) == ("lost", "update", int(number)):
        lose()
        now = "lost"
    if (now, count) != ("update" if place == "launcher" else place, int(number)):
        return
    if place == "launcher":
        print("waiting to be told", flush=True)
    elif world.rank != int(who):
        return
    else:
        os.kill(os.getpid(), signal.SIGUSR1 if world.rank else signal.SIGTERM)
    deadline = time.monotonic() + 30
    while not preemption.is_preempted() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert preemption.is_preempted()


class Counter:
    """Something of the user's, which notices when it is saved."""

    epoch = 0

    def state_dict(self) -> dict[str, Any]:
        told("save", self.epoch)
        return {"epoch": self.epoch}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.epoch = saved["epoch"]


with hvdtrain.init("torch", engine=os.environ.get("ENGINE", "auto"), seed=3) as world:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    data = hvt.loader((x, x.sum(1, keepdim=True)), 4)  # 2 ranks: 6 batches, 3 updates an epoch
    held_out = hvt.loader((x[:10], x[:10].sum(1, keepdim=True)), 4, shuffle=False)
    model, optimizer = hvt.prepare(model, optimizer, data, accumulate=2)
    counter = Counter()
    checkpoints = hvdtrain.Checkpointer(folder, best=None, keep=20)
    state = hvt.model_state(model, optimizer, data, extra={"counter": counter})
    checkpoints.on_preemption(state)
    checkpoints.restore(state)
    for epoch in data.epochs(3):
        for batch, (inputs, targets) in enumerate(data, 1):
            optimizer.zero_grad()
            optimizer.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            told("accumulation" if batch % 2 else "update", optimizer.progress.step)
        counter.epoch = epoch
        told("validation", epoch)
        hvt.evaluate(model, held_out, lambda output, target: {"loss": (output - target).square().mean(1)})
        checkpoints.save(state, progress=optimizer.progress)
    print("trained", hvt.fingerprint(model), flush=True)
