"""Rank 1 has a backward pass that fails, and tries again while rank 0 waits; usage: one_backward_fails.py ENGINE."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import hvdtrain
import hvdtrain.torch as hvt

with hvdtrain.init("torch", engine=sys.argv[1], device="cpu") as world:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = hvt.loader(TensorDataset(torch.randn(16, 3), torch.zeros(16, dtype=torch.long)), per_rank_batch=4)
    fails = iter([world.rank == 1])

    def hook(gradient: Tensor) -> Tensor:
        if next(fails, False):
            raise RuntimeError("out of luck")
        return gradient

    model, optimizer = hvt.prepare(model, optimizer, train)
    model[0].bias.register_hook(hook)
    for x, y in train:
        loss = nn.functional.cross_entropy(model(x), y)
        try:
            optimizer.backward(loss)
        except RuntimeError as error:
            print(f"rank {world.rank} tries again after {error}", flush=True)
            optimizer.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        print(f"rank {world.rank} has updated", flush=True)
