"""ResNet-50 in bf16, channels last, on one batch: images a second, and a step of hvdtrain's loop against the bare one.

Both loops are in this process, each with a model of its own, and take turns; the ratio is the median over rounds. Again
with a small batch, where the time is Python's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.bench.gpu.found import Goal, arguments, main, say
from hvdtrain.record import stats
from hvdtrain.torch.engines.engine import device_of

CLASSES, OVERHEAD = 1000, 1.01
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


def check() -> None:
    args = arguments(__doc__, "engine")
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
    if tiny:
        parts = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        made: nn.Module = nn.Sequential(*parts, nn.Linear(8, CLASSES))
    else:
        import torchvision

        made = torchvision.models.resnet50(num_classes=CLASSES)
    made = made.to(device)
    return made.to(memory_format=torch.channels_last)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def prepared(device: torch.device, data: Any = None, *, tiny: bool) -> Callable[[Tensor, Tensor], None]:
    """hvdtrain's loop: a step on a batch."""
    whole = resnet(device, tiny=tiny)
    model, optimizer = hvt.prepare(whole, sgd(whole), data, amp="bf16", channels_last=True)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        optimizer.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()

    return step


def bare(device: torch.device, *, tiny: bool) -> Callable[[Tensor, Tensor], None]:
    """The same in plain PyTorch."""
    model = resnet(device, tiny=tiny)
    optimizer = sgd(model)

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
    wait: Step = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(3):
        for step in arms.values():
            step()
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(sizes.rounds):
        for name in stats.rotated(arms, turn):
            arms[name]()
            wait()
            started = time.perf_counter()
            for _ in range(sizes.steps):
                arms[name]()
            wait()
            seconds[name].append((time.perf_counter() - started) / sizes.steps)
    return seconds


if __name__ == "__main__":
    main(check)
