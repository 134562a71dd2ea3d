"""Trains a model that is split over two devices, and the same one whole; prints the largest difference of weights."""

import copy

import torch
from torch import nn

import hvdtrain.pipeline

torch.manual_seed(7)
torch.set_default_dtype(torch.float64)
x, y = torch.randn(24, 6), torch.randn(24, 2)
layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)]
whole = nn.Sequential(*layers)
before = copy.deepcopy(whole)
pipe = hvdtrain.pipeline.split(copy.deepcopy(whole), x, ["cpu", "cpu"], balance=[2, 1], micro_batches=3)
for trained in (whole, pipe):
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        if trained is pipe:
            pipe.step(x, y, nn.functional.mse_loss)
        else:
            nn.functional.mse_loss(whole(x), y).backward()
        optimizer.step()


def difference(one: nn.Module, other: nn.Module) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one.parameters(), other.parameters(), strict=True))


print("stages", len(pipe.stages), "moved", difference(before, pipe), "difference", difference(whole, pipe))
