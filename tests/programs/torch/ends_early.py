"""A training that ends in mid-epoch; usage: ends_early.py WAY.

leaves: rank 1 ends with 0 after 13 updates; crashes: all raise after 13, which is 3 after the checkpoint.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hvdtrain
import hvdtrain.torch as hvt

with hvdtrain.init("torch", device="cpu") as world:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = hvt.loader(TensorDataset(torch.ones(160, 4), torch.zeros(160, dtype=torch.long)), per_rank_batch=4)
    model, optimizer = hvt.prepare(model, optimizer, train)
    checkpoints, state = hvdtrain.Checkpointer("checkpoints", best=None), hvt.model_state(model, optimizer)
    checkpoints.restore(state)
    for x, y in train:
        if optimizer.progress.step == 13:
            if sys.argv[1] == "crashes":
                raise ValueError("always here")
            if world.rank == 1:
                os._exit(0)
        optimizer.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        if optimizer.progress.step == 10:
            checkpoints.save(state, progress=optimizer.progress)
