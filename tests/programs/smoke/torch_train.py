"""Trains a small model on 37 samples in float64 and prints its weights.

`plain` goes without hvdtrain, `ranks FOLDER EPOCHS` with it. With `hang`, rank 1 never reaches the second epoch.
"""

import json
import sys

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(7)
x = torch.randn(37, 5)
y = (x.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss_of = nn.functional.cross_entropy


def plain():
    for _ in range(2):
        for begin in range(0, len(x), 8):
            optimizer.zero_grad()
            loss_of(model(x[begin : begin + 8]), y[begin : begin + 8]).backward()
            optimizer.step()
    show(model)


def ranks(way, folder=None, epochs="2"):
    import hvdtrain
    import hvdtrain.torch as hvt

    with hvdtrain.init("torch") as world:
        train = hvt.loader((x, y), per_rank_batch=8 // world.size, shuffle=False)
        trained, stepped = hvt.prepare(model, optimizer, train)
        if folder:
            checkpoints = hvdtrain.Checkpointer(folder, best=None)
            print("restored", checkpoints.restore(hvt.model_state(trained, stepped, train)) is not None)
        for epoch in train.epochs(int(epochs)):
            while (way, epoch, world.rank) == ("hang", 1, 1):  # hangs here
                pass  # hangs here
            for a, b in train:
                stepped.zero_grad()
                stepped.backward(loss_of(trained(a), b))
                stepped.step()
            if folder:
                checkpoints.save(hvt.model_state(trained, stepped, train), progress=stepped.progress)
        if world.is_main:
            show(trained)


def show(trained):
    print("weights", json.dumps([p.tolist() for p in trained.parameters()]), flush=True)


if sys.argv[1] == "plain":
    plain()
else:
    ranks(*sys.argv[1:])
