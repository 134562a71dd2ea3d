"""`tuned.py UPDATES`: a small training whose length, draws and learning rate the test chooses.

Prints what Horovod was started with. `RATE` in the environment is its learning rate.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

import hvdtrain
import hvdtrain.torch as hvt


def main() -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(1024, 4, generator=draw)
    with hvdtrain.init("torch", device="cpu", seed=1) as world:
        names = ("HOROVOD_CYCLE_TIME", "HVDTRAIN_BUCKET_BYTES")
        print("started with", *(f"{name}={os.environ.get(name)}" for name in names), flush=True)
        train = hvt.loader((x, x.sum(1, keepdim=True)), 2, world=world)
        plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        rate = float(os.environ.get("RATE", "0.01"))
        model, optimizer = hvt.prepare(plain, torch.optim.SGD(plain.parameters(), lr=rate), train)
        for inputs, targets in train:
            optimizer.zero_grad()
            optimizer.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            if optimizer.progress.step == int(sys.argv[1]):
                break


if __name__ == "__main__":
    main()
