"""Does the loader keep up with the device: ResNet-50 from a loader, against the same steps on one batch, in turns.

From pictures in memory, and from JPEG files by as many workers as the loader chooses.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.bench.gpu.found import Goal, say
from hvdtrain.bench.gpu.speed import REAL, TINY, Sizes, in_turns, prepared
from hvdtrain.bench.input import write_pictures
from hvdtrain.bench.turns.train_job import CLASSES
from hvdtrain.datasets import load_folder
from hvdtrain.record import stats
from hvdtrain.torch.engines.engine import device_of

IN_MEMORY = 1.05  # a step from the loader, against one whose batch lies there


def check(args: argparse.Namespace) -> None:
    sizes, many = (TINY, 24) if args.tiny else (replace(REAL, rounds=5), 8192)
    with (
        tempfile.TemporaryDirectory(prefix="hvdtrain-gpu-") as folder,
        hvdtrain.init("torch", engine="solo", device=args.device, seed=5) as world,
    ):
        device = device_of(world)
        torch.backends.cudnn.benchmark = True
        draw = torch.Generator().manual_seed(3)
        shape = (many, 3, sizes.pixels, sizes.pixels)
        x = torch.randint(0, 255, shape, dtype=torch.uint8, generator=draw).numpy()
        y = torch.randint(0, CLASSES, (many,), generator=draw).numpy()
        augment = hvt.crop_flip(hvt.IMAGENET_MEAN, hvt.IMAGENET_STD)
        memory = hvt.loader((x, y), sizes.batch, augment=augment, tail="drop")
        train, _ = load_folder(_files(Path(folder), many, tiny=args.tiny), world=world)
        files = hvt.loader(hvt.ImageFiles(train, train=True, size=sizes.pixels), sizes.batch, tail="drop")
        ratios, rates = {}, {}
        for name, loader in {"memory": memory, "files": files}.items():
            seconds = _from(loader, sizes, device, tiny=args.tiny)
            ratios[name] = stats.ratio_of_medians(seconds["loader"], seconds["one batch"])
            rates[name] = round(sizes.batch / median(seconds["loader"]))
            loader.close()
        goal = Goal("from memory, against one batch, at least", ratios["memory"].low, None if args.tiny else IN_MEMORY)
        say(
            [goal], memory=f"{ratios['memory']} at {rates['memory']} images/s",
            files=f"{ratios['files']} at {rates['files']} images/s", workers=files.workers,
            cores=len(os.sched_getaffinity(0)),
        )  # fmt: skip


def _from(loader: Any, sizes: Sizes, device: torch.device, *, tiny: bool) -> dict[str, list[float]]:
    step, still = prepared(device, loader, tiny=tiny), prepared(device, tiny=tiny)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    x, y = next(batches)
    step(x, y)
    x, y = x.clone(), y.clone()
    return in_turns({"loader": lambda: step(*next(batches)), "one batch": lambda: still(x, y)}, sizes, device)


def _files(root: Path, many: int, *, tiny: bool) -> Path:
    """Made-up JPEGs, each under many names: workers begin anew with each pass, which must last."""
    unique = 8 if tiny else 256
    write_pictures(root, unique)
    for picture in sorted(root.glob("*/*.jpg")):
        for number in range(1, many // unique):
            os.link(picture, picture.with_name(f"{picture.stem}-{number}.jpg"))
    return root
