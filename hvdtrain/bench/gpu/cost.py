"""What training costs: ResNet-50 in bf16, channels last, against the bare loop; a model in two stages; what 200 steps
leave behind."""

from __future__ import annotations

import argparse
import copy
import gc
import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.bench.gpu.check import Found, Goal, apart
from hvdtrain.bench.turns.train_job import CLASSES, TOY, network, torch_sgd
from hvdtrain.pipeline import split
from hvdtrain.pipeline.tuning.unsplit import seconds_of
from hvdtrain.record import stats
from hvdtrain.torch.engines.engine import device_of

OVERHEAD = 1.01
EXACT, STEPS = 1e-10, 4  # of stages
BATCH, SIZE, STEPS_AN_EPOCH, EVERY = 16, 16, 20, 5  # of what is left behind
MIB = 2**20
Step = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a measurement; `small`: the batch where Python is the limit."""

    batch: int
    small: int
    pixels: int
    steps: int
    rounds: int


REAL, TINY = Sizes(256, 16, 224, 15, 9), Sizes(4, 2, 32, 1, 3)


def speed(args: argparse.Namespace) -> Found:
    """Images a second, and a step of hvdtrain's loop against the bare one; again with a small batch, where the time is
    Python's. Both loops are in this process, each with a model of its own, and take turns."""
    sizes = TINY if args.tiny else REAL
    with hvdtrain.init("torch", engine=args.engine, device=args.device, seed=5) as world:
        device = device_of(world)
        torch.backends.cudnn.benchmark = True
        large, small = (_compared(batch, sizes, device, tiny=args.tiny) for batch in (sizes.batch, sizes.small))
        ratio = stats.ratio_of_medians(large["hvdtrain"], large["bare"])
        at_small = stats.ratio_of_medians(small["hvdtrain"], small["bare"])
        goal = Goal("overhead, at least", ratio.low, None if args.tiny else OVERHEAD)
        rate = {name: round(sizes.batch / median(its)) for name, its in large.items()}
        return [goal], {
            "images_per_s": rate["hvdtrain"], "bare_images_per_s": rate["bare"], "overhead": str(ratio),
            "small_batch": f"{at_small} at {sizes.small} a step of {stats.milliseconds(small['bare'])}",
            "batch": sizes.batch,
            "memory_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else 0,
            "engine": world.engine, "samples_s": large,
        }  # fmt: skip


def resnet(device: torch.device, *, tiny: bool) -> nn.Module:
    """Returns a ResNet-50 in channels last; `tiny`: a toy of one convolution instead."""
    torch.manual_seed(0)
    made: nn.Module = network(TOY if tiny else "resnet50").to(device)
    return made.to(memory_format=torch.channels_last)


def prepared(device: torch.device, *, tiny: bool) -> Callable[[Tensor, Tensor], None]:
    """hvdtrain's loop: a step on a batch."""
    whole = resnet(device, tiny=tiny)
    model, optimizer = hvt.prepare(whole, torch_sgd(whole.parameters()), amp="bf16", channels_last=True)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        optimizer.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()

    return step


def bare(device: torch.device, *, tiny: bool) -> Callable[[Tensor, Tensor], None]:
    """A plain PyTorch loop: a step on a batch."""
    model = resnet(device, tiny=tiny)
    optimizer = torch_sgd(model.parameters())

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    return step


def _compared(batch: int, sizes: Sizes, device: torch.device, *, tiny: bool) -> dict[str, list[float]]:
    x = torch.randn(batch, 3, sizes.pixels, sizes.pixels, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(0, CLASSES, (batch,), device=device)
    loops = {"bare": bare(device, tiny=tiny), "hvdtrain": prepared(device, tiny=tiny)}
    return in_turns({name: partial(step, x, y) for name, step in loops.items()}, sizes, device)


def in_turns(arms: Mapping[str, Step], sizes: Sizes, device: torch.device) -> dict[str, list[float]]:
    """Seconds of a step of each, round by round."""

    def seconds(step: Step) -> float:
        step()
        return seconds_of(lambda: [step() for _ in range(sizes.steps)], [device]) / sizes.steps

    for _ in range(3):
        for step in arms.values():
            step()
    return stats.in_turns({name: partial(seconds, step) for name, step in arms.items()}, sizes.rounds)


# ---- two stages


def stages(args: argparse.Namespace) -> Found:
    """Two stages on one device against the unsplit model: weights in float64."""
    name = f"{args.device}:0" if args.device == "cuda" else "cpu"
    with hvdtrain.init("torch", engine="solo", device=args.device, seed=5):
        off = _difference(torch.device(name))
        return [Goal("weights off by", off, EXACT)], {"devices": f"{name},{name}"}


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


# ---- what is left behind


def resources(args: argparse.Namespace) -> Found:
    """Measures what 200 steps with evaluations leave behind: memory, threads, open files, streams."""
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
        goals = [Goal(f"{name} more", grown[name], limits[name]) for name in grown]
        return goals, {"steps": steps, "at_the_end": last}


def used() -> dict[str, float]:
    """Returns what this process holds now: threads, files, memory and, on a GPU, streams."""
    gc.collect()
    found = {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "MiB": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MIB,
    }
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        found |= {
            "GPU MiB": torch.cuda.memory_allocated() / MIB,
            "GPU MiB reserved": torch.cuda.memory_reserved() / MIB,
            "streams": len({segment["stream"] for segment in torch.cuda.memory_snapshot()}),
        }
    return {name: round(float(value), 2) for name, value in found.items()}
