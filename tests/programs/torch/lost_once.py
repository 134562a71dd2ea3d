"""Trains without a run directory; the job's first rank 1 is killed after ten updates: lost_once.py"""

from __future__ import annotations

import os
import signal

import torch

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.comm.ring import own_folder

with hvdtrain.init("torch") as world:
    lost = world.rank == 1 and os.environ["HVDTRAIN_ELASTIC"] == "1"
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(320, 4)
    data = hvt.loader((x, x.sum(1, keepdim=True)), 4)
    model, optimizer = hvt.prepare(model, optimizer, data)
    updates = 0
    for _ in data.epochs(1):
        for inputs, targets in data:
            optimizer.zero_grad()
            optimizer.backward(((model(inputs) - targets) ** 2).mean())
            optimizer.step()
            updates += 1
            if lost and updates == 10:
                folder = own_folder()
                assert folder is not None and len(list(folder.glob("*.ring"))) == 2
                os.kill(os.getpid(), signal.SIGKILL)
print("trained")
