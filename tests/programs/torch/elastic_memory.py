"""A program that changes while it trains: `elastic_memory.py OUT HOW EPOCHS`, to be joined by ranks in the middle.

HOW is "frozen" (from epoch 1 on, by an `if epoch == 1`), "buffer" (one that no checkpoint holds changes in `forward`),
or "loss" (another one from epoch 1 on, too). Rank 0 notes the samples of all ranks by update, and leaves the weights.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import hvdtrain
import hvdtrain.torch as hvt

SAMPLES, BATCH = 48, 6


class Net(nn.Module):
    cooling: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.register_buffer("cooling", torch.ones((), dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.cooling *= 0.99
        return self.layers(x) * self.cooling


def build() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def samples() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x.sum(1, keepdim=True), torch.arange(SAMPLES)


def changes(how: str, epoch: int, model: nn.Module, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    if how == "frozen" and epoch == 1:
        next(model.parameters()).requires_grad_(False)
    return nn.functional.l1_loss if how == "loss" and epoch == 1 else loss


def main() -> None:
    out, how, epochs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    with hvdtrain.init("torch", device="cpu") as world:
        net, optimizer = build()
        train = hvt.loader(samples(), BATCH // world.size)
        model, trained = hvt.prepare(net, optimizer, train)
        loss: Callable[..., Tensor] = nn.functional.mse_loss
        for epoch in train.epochs(epochs):
            loss = changes(how, epoch, net, loss)
            for x, y, ids in train:
                before, padding = trained.progress.step, train.step is None or train.step.padding
                time.sleep(0.3 if epoch > 1 else 0.01)  # how long an update takes: others join after epoch 1
                trained.zero_grad()
                trained.backward(loss(model(x), y))
                trained.step()
                taken = world.gather([] if padding or trained.progress.step == before else ids.tolist())
                if world.is_main:
                    with (out / "updates").open("a") as file:
                        print(json.dumps([trained.progress.step, epoch, sum(taken, [])]), file=file)
        if world.is_main:
            torch.save(net.layers.state_dict(), out / "final.pt")


if __name__ == "__main__":
    main()
