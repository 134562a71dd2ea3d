"""A model in two stages on one device, against the unsplit model: weights in float64, and the time of a step."""

from __future__ import annotations

import argparse
import copy
from dataclasses import replace
from statistics import median

import torch
from torch import nn

import hvdtrain
from hvdtrain.bench.gpu.found import Goal, apart, say
from hvdtrain.bench.gpu.speed import REAL, in_turns
from hvdtrain.pipeline import split

EXACT, STEPS = 1e-10, 4


def check(args: argparse.Namespace) -> None:
    name = f"{args.device}:0" if args.device == "cuda" else "cpu"
    with hvdtrain.init("torch", engine="solo", device=args.device, seed=5):
        off = _difference(torch.device(name))
        cut, whole = _times(torch.device(name), tiny=args.tiny)
        say(
            [Goal("weights off by", off, EXACT)],
            devices=f"{name},{name}", ms_split=round(cut * 1e3, 2), ms_unsplit=round(whole * 1e3, 2),
        )  # fmt: skip


def _difference(device: torch.device) -> float:
    torch.manual_seed(3)
    parts = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(128, 5)]
    model = nn.Sequential(*parts).double()
    whole = copy.deepcopy(model).to(device)
    x, y = torch.randn(10, 3, 8, 8, dtype=torch.float64).to(device), torch.arange(10, device=device) % 5
    pipe = split(model, x, f"{device},{device}", micro_batches=3)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        pipe.step(x, y, nn.functional.cross_entropy)
        optimizer.step()
        plain.zero_grad()
        nn.functional.cross_entropy(whole(x), y).backward()
        plain.step()
    return apart(pipe.module.state_dict(), whole.state_dict())


def _times(device: torch.device, *, tiny: bool) -> tuple[float, float]:
    """Seconds of a step, split and unsplit: on one device a pipeline can only lose."""
    torch.manual_seed(3)
    width, batch, steps = (8, 8, 2) if tiny else (4096, 512, 5)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)])
    whole = copy.deepcopy(model).to(device)
    x, y = torch.randn(batch, width, device=device), torch.randn(batch, width, device=device)
    pipe = split(model, x, f"{device},{device}", micro_batches=4)
    loss = nn.functional.mse_loss
    arms = {"cut": lambda: pipe.step(x, y, loss), "whole": lambda: loss(whole(x), y).backward()}
    seconds = in_turns(arms, replace(REAL, steps=steps, rounds=3), device)
    return median(seconds["cut"]), median(seconds["whole"])
