"""Two ranks whose run has something to report; usage: reported.py FOLDER straggler|input."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

import hvdtrain
import hvdtrain.torch as hvt


class Slow(torch.utils.data.Dataset):
    """Takes its time with every sample."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.seconds)
        return torch.full((64,), float(index % 4)), index % 4


folder, how = Path(sys.argv[1]), sys.argv[2]
with hvdtrain.init("torch", device="cpu") as world:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = hvt.loader(Slow(0.004 if how == "input" else 0.0), 8)
    model, optimizer = hvt.prepare(model, optimizer, data)
    with hvdtrain.RunLog(folder, world, config={"per_rank_batch": 8, "how": how}, tensorboard=False) as run:
        for epoch in data.epochs(2):
            for x, y in data:
                if how == "straggler" and world.rank == 1:
                    time.sleep(0.04)
                optimizer.zero_grad()
                optimizer.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                run.step(**optimizer.record())
            run.epoch(epoch, {"seen": 128.0}, 1.0, optimizer.phases())
