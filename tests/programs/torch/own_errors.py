"""Programs alone whose error, or seed, is PyTorch's own to report; usage: own_errors.py seed|tail [SEED]"""

from __future__ import annotations

import sys

import torch
from torch import nn

import hvdtrain
import hvdtrain.torch as hvt

if sys.argv[2:]:
    torch.manual_seed(int(sys.argv[2]))
with hvdtrain.init("torch", device="cpu"):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = 17 if sys.argv[1] == "tail" else 16
    train = hvt.loader((torch.randn(rows, 3), torch.zeros(rows, dtype=torch.long)), 8, shuffle=False)
    model, optimizer = hvt.prepare(model, optimizer, train)
    for x, y in train:
        optimizer.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
