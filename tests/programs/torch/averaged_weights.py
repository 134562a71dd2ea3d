"""Weights averaged over epochs, whose batch-norm statistics are taken again; usage: averaged_weights.py OURS SAMPLES

OURS: 1 with `hvdtrain.torch.update_bn`, 0 with PyTorch's own on each rank.
"""

from __future__ import annotations

import sys

import torch
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


def one_process() -> AveragedModel:
    model, optimizer = made()
    averaged = AveragedModel(model)
    for _ in range(3):
        for at in range(0, SAMPLES, UPDATE):
            optimizer.zero_grad()
            (model(X[at : at + UPDATE]) - Y[at : at + UPDATE]).square().mean().backward()
            optimizer.step()
        averaged.update_parameters(model)
    update_bn([(X[at : at + UPDATE],) for at in range(0, SAMPLES, UPDATE)], averaged)
    return averaged


def main() -> None:
    with hvdtrain.init("torch", device="cpu") as world:
        plain, optimizer = made()
        train = hvt.loader((X, Y), per_rank_batch=UPDATE // world.size, shuffle=False)
        model, optimizer = hvt.prepare(plain, optimizer, train, sync_batchnorm=True)
        averaged = AveragedModel(plain)
        for _ in train.epochs(3):
            for x, y in train:
                optimizer.zero_grad()
                optimizer.backward((model(x) - y).square().mean())
                optimizer.step()
            averaged.update_parameters(plain)
        if int(sys.argv[1]):
            hvt.update_bn(train, averaged)
        else:
            with torch.no_grad():
                update_bn(train, averaged)
        wanted = one_process().state_dict()
        gap = max(float((averaged.state_dict()[name] - value).abs().max()) for name, value in wanted.items())
        print(f"gap {max(world.gather(gap)):.1e}", flush=True)


if __name__ == "__main__":
    main()
