"""What 200 steps leave behind, evaluations among them: memory, threads, open files, streams."""

from __future__ import annotations

import argparse
import gc
import os
import resource

import torch
from torch import nn

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.bench.gpu.found import Goal, say

BATCH, SIZE, STEPS_AN_EPOCH, EVERY = 16, 16, 20, 5
MIB = 2**20


def check(args: argparse.Namespace) -> None:
    epochs, before = (4, 2) if args.tiny else (13, 3)
    with hvdtrain.init("torch", engine="solo", device=args.device, seed=5):
        torch.manual_seed(3)
        module = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10)
        )
        x = torch.randint(0, 255, (BATCH * STEPS_AN_EPOCH - 5, 3, SIZE, SIZE), dtype=torch.uint8).numpy()
        y = torch.randint(0, 10, (len(x),)).numpy()
        flip = hvt.crop_flip(hvt.CIFAR10_MEAN, hvt.CIFAR10_STD)
        train = hvt.loader((x, y), BATCH, augment=flip, workers=1)
        model, optimizer = hvt.prepare(
            module, torch.optim.SGD(module.parameters(), lr=0.01), train, amp="bf16", channels_last=True
        )
        first: dict[str, float] = {}
        steps = 0
        for epoch in train.epochs(epochs):
            for pictures, labels in train:
                optimizer.zero_grad()
                optimizer.backward(nn.functional.cross_entropy(model(pictures), labels))
                optimizer.step()
                steps += epoch >= before
            if epoch % EVERY == 0 or epoch < before:
                normalise = hvt.normalise(hvt.CIFAR10_MEAN, hvt.CIFAR10_STD)
                hvt.evaluate(model, (x, y), hvt.classification(top=(1,)), per_rank_batch=BATCH, augment=normalise)
            if epoch == before - 1:
                first = used()
        last = used()
        grown = {name: last[name] - first[name] for name in last}
        limits = {"threads": 0, "files": 0, "streams": 0, "GPU MiB": 1, "GPU MiB reserved": 32, "MiB": 64}
        say([Goal(f"{name} more", grown[name], limits[name]) for name in grown], steps=steps, at_the_end=last)


def used() -> dict[str, float]:
    """What this process holds now."""
    gc.collect()
    found = {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "MiB": resident_bytes() / MIB,
    }
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        found |= {
            "GPU MiB": torch.cuda.memory_allocated() / MIB,
            "GPU MiB reserved": torch.cuda.memory_reserved() / MIB,
            "streams": len({segment["stream"] for segment in torch.cuda.memory_snapshot()}),
        }
    return {name: round(float(value), 2) for name, value in found.items()}


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
