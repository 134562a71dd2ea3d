"""Weights averaged over epochs, whose batch-norm statistics are taken again; usage: averaged_weights.py OURS SAMPLES

OURS: 1 with `hvdtrain.torch.update_bn`, 0 with PyTorch's own on each rank.
"""

from __future__ import annotations

import sys

import torch
from cases import gap, plainly, train, windows
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

import hvdtrain
import hvdtrain.torch as hvt

SAMPLES, UPDATE = int(sys.argv[2]), 12
torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
X, Y = torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 1)
X[torch.arange(SAMPLES) % UPDATE >= UPDATE // 2] += 4  # the parts of a batch differ


def made() -> tuple[nn.Module, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
    return model, torch.optim.SGD(model.parameters(), 0.05)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def one_process() -> AveragedModel:
    model, optimizer = made()
    averaged = AveragedModel(model)
    for _ in range(3):
        plainly(model, optimizer, windows(UPDATE, X, Y), loss_of)
        averaged.update_parameters(model)
    update_bn(windows(UPDATE, X), averaged)
    return averaged


def main() -> None:
    with hvdtrain.init("torch", device="cpu") as world:
        plain, optimizer = made()
        data = hvt.loader((X, Y), per_rank_batch=UPDATE // world.size, shuffle=False)
        model, optimizer = hvt.prepare(plain, optimizer, data, sync_batchnorm=True)
        averaged = AveragedModel(plain)
        for _ in data.epochs(3):
            train(model, optimizer, data, loss_of)
            averaged.update_parameters(plain)
        if int(sys.argv[1]):
            hvt.update_bn(data, averaged)
        else:
            with torch.no_grad():
                update_bn(data, averaged)
        print(f"gap {max(world.gather(gap(averaged, one_process()))):.1e}", flush=True)


if __name__ == "__main__":
    main()
