"""A loop on Lightning Fabric whose last rank gets SIGTERM in its third batch: the ranks save, and end."""

from __future__ import annotations

import os
import signal
import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hvdtrain.integrations.fabric import HorovodFabricStrategy

if __name__ == "__main__":
    fabric = lightning.Fabric(accelerator="cpu", strategy=HorovodFabricStrategy(device="cpu"))
    fabric.launch()
    model = nn.Linear(3, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    pairs = TensorDataset(torch.zeros(4000, 3), torch.zeros(4000, 1))
    for number, (x, y) in enumerate(fabric.setup_dataloaders(DataLoader(pairs, batch_size=1))):
        if number == 2 and fabric.global_rank == fabric.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        optimizer.zero_grad()
        fabric.backward((model(x) - y).square().mean())
        optimizer.step()
        if fabric.strategy.preempted:  # type: ignore[attr-defined]
            fabric.save(sys.argv[1], {"model": model, "optimizer": optimizer})
    print("the loop ended")
