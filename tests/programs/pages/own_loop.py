"""A PyTorch loop that is recorded: docs/how-slow.md."""

import time

import torch

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.record.log import read_events

x, y = torch.randn(64, 4), torch.randint(0, 3, (64,))
validation = (x, y)
loss_of = torch.nn.CrossEntropyLoss()
world = hvdtrain.init("torch")
model: torch.nn.Module = torch.nn.Linear(4, 3)
optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = hvt.loader((x, y), per_rank_batch=16)
model, optimizer = hvt.prepare(model, optimizer, train)
# the page
epochs = [event for event in read_events("runs/mine") if event["kind"] == "epoch"]
assert len(epochs) == 2 and "top1" in epochs[0]["metrics"] and epochs[0]["ranks"], epochs
