"""ResNet-50 in bf16, channels last, on one batch: images a second, and a step of hvdtrain's loop against the bare one.

Both loops are in this process, each with a model of its own, and take turns; the ratio is the median over rounds. Again
with a small batch, where the time is Python's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.bench.gpu.found import Goal, say
from hvdtrain.bench.turns.train_job import CLASSES, TOY, network, torch_sgd
from hvdtrain.pipeline.tuning.unsplit import seconds_of
from hvdtrain.record import stats
from hvdtrain.torch.engines.engine import device_of

OVERHEAD = 1.01
Step = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    """Of a measurement; `small`: the batch where Python is the limit."""

    batch: int
    small: int
    pixels: int
    steps: int
    rounds: int


REAL, TINY = Sizes(256, 16, 224, 15, 9), Sizes(4, 2, 32, 1, 3)


def check(args: argparse.Namespace) -> None:
    sizes = TINY if args.tiny else REAL
    with hvdtrain.init("torch", engine=args.engine, device=args.device, seed=5) as world:
        device = device_of(world)
        torch.backends.cudnn.benchmark = True
        large, small = (_compared(batch, sizes, device, tiny=args.tiny) for batch in (sizes.batch, sizes.small))
        ratio = stats.ratio_of_medians(large["hvdtrain"], large["bare"])
        at_small = stats.ratio_of_medians(small["hvdtrain"], small["bare"])
        goal = Goal("overhead, at least", ratio.low, None if args.tiny else OVERHEAD)
        rate = {name: round(sizes.batch / median(its)) for name, its in large.items()}
        say(
            [goal], images_per_s=rate["hvdtrain"], bare_images_per_s=rate["bare"], overhead=str(ratio),
            small_batch=f"{at_small} at {sizes.small} a step of {stats.milliseconds(small['bare'])}", batch=sizes.batch,
            memory_GiB=round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else 0,
            engine=world.engine, samples_s=large,
        )  # fmt: skip


def resnet(device: torch.device, *, tiny: bool) -> nn.Module:
    """In channels last; `tiny`: one convolution."""
    torch.manual_seed(0)
    made: nn.Module = network(TOY if tiny else "resnet50").to(device)
    return made.to(memory_format=torch.channels_last)


def prepared(device: torch.device, data: Any = None, *, tiny: bool) -> Callable[[Tensor, Tensor], None]:
    """hvdtrain's loop: a step on a batch."""
    whole = resnet(device, tiny=tiny)
    model, optimizer = hvt.prepare(whole, torch_sgd(whole.parameters()), data, amp="bf16", channels_last=True)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        optimizer.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()

    return step


def bare(device: torch.device, *, tiny: bool) -> Callable[[Tensor, Tensor], None]:
    """The same in plain PyTorch."""
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
