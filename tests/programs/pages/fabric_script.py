"""The blocks of docs/how-fabric.md, on real digits."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hvdtrain.datasets import load_digits

digits = load_digits()
dataset, validation = (
    TensorDataset(torch.from_numpy(x[:, :1]).float() / 255, torch.from_numpy(y).long())
    for x, y in ((digits.x_train, digits.y_train), (digits.x_test, digits.y_test))
)
model = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(64, 10))

# the page
assert fabric.global_rank == fabric.strategy.world.rank and fabric.world_size == fabric.strategy.world.size
assert fabric.all_reduce(right, reduce_op="sum") / len(validation) > 0.5
assert "data" in fabric.load("fabric.ckpt")
