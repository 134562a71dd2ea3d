"""CIFAR-10 with a small CNN, from one process to many: lines that end in "# +" are what hvdtrain adds to a plain
PyTorch script. Data that is not there is downloaded (`--data digits`: offline, real digits as pictures of 3x32x32)."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import hvdtrain  # +
from hvdtrain.core import flags
from hvdtrain.core.launchers import Detected
from hvdtrain.datasets import load_cifar10, load_digits
from hvdtrain.record import folder
from hvdtrain.world import startup
from hvdtrain.world.world import World

PROGRAM = "hvdtrain.torch_cifar10"


def train(args: argparse.Namespace, world: World) -> None:
    """The whole program, on every rank."""
    import torch
    from torch import nn

    import hvdtrain.torch as hvt  # +

    started = time.perf_counter()
    digits = args.data == "digits"
    images = load_digits() if digits else load_cifar10(args.data, world=world)
    model: nn.Module = nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()

    mean, std = hvt.CIFAR10_MEAN, hvt.CIFAR10_STD
    augment = hvt.crop_flip(mean, std, pad=4, flip=not digits)  # + whole batches, on the device
    batches = hvt.loader((images.x_train, images.y_train), args.per_rank_batch, augment=augment)  # +
    held_out = hvt.loader((images.x_test, images.y_test), 100, augment=hvt.normalise(mean, std), shuffle=False)  # +
    samples = len(images.x_train)
    rate = hvdtrain.LR(  # + scaled to the batch of all ranks, warmed up, then a cosine
        args.lr, reference_batch=32, warmup_samples=samples // 2, schedule="cosine", total_samples=args.epochs * samples
    )
    model, optimizer = hvt.prepare(model, optimizer, batches, lr=rate, amp=args.amp)  # +
    checkpoints = hvdtrain.Checkpointer(args.run_dir / "checkpoints", best="top1", mode="max")  # +

    resume = args.resume or world.on_main(folder.goes_on, args.run_dir)  # + preempted, and started again
    with hvdtrain.RunLog(args.run_dir, world, config={**vars(args), "lr": rate}, resume=resume) as run:  # +
        checkpoints.run = run  # +
        checkpoints.on_preemption(hvt.model_state(model, optimizer, batches))  # + preempted, it saves first
        if resume:
            checkpoints.restore(hvt.model_state(model, optimizer, batches))  # +
        for epoch in batches.epochs(args.epochs):  # + instead of range(epochs)
            began = time.perf_counter()
            for pictures, labels in batches:
                optimizer.zero_grad()
                optimizer.backward(loss_of(model(pictures), labels))  # + instead of loss.backward()
                optimizer.step()
                run.step(**optimizer.record())  # +
            scores = hvt.evaluate(model, held_out, hvt.classification(top=(1,)))  # +
            state = hvt.model_state(model, optimizer, batches)  # +
            checkpoints.save(state, progress=optimizer.progress, metrics=scores)  # +
            run.epoch(epoch, scores, time.perf_counter() - began, optimizer.phases())  # +
        scores = hvt.evaluate(model, held_out, hvt.classification(top=(1,)))
        run.result(**scores, weights_sha256=hvt.fingerprint(model))
        if world.is_main:  # + one of them talks; where the time went is the run log's last word
            took = f"{time.perf_counter() - started:.1f} s in all"
            batch = f"{args.per_rank_batch * world.size} pictures an update"
            print(f"{images.note}\ntop-1 {scores['top1']:.4f}; {batch}, {took}", flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = flags.Parser(PROGRAM, description="CIFAR-10 with a small CNN on any number of ranks", epilog="")
    text = "PATH: its archive or folder (default: cifar10, from the cache or downloaded)"
    p.add_argument("--data", default="cifar10", metavar="cifar10|digits|PATH", help=text)
    p.add_argument("--epochs", type=flags.whole(1), default=10, metavar="N", help="(default: 10)")
    p.add_argument("--per-rank-batch", type=flags.whole(1), default=32, metavar="N", help="(default: 32)")
    p.add_argument(
        "--lr", type=flags.positive, default=0.01, metavar="RATE", help="learning rate at batch 32 (default: 0.01)"
    )
    p.add_argument("--amp", choices=["bf16", "fp16"], help="mixed precision (default: none)")
    p.add_argument("--engine", default="auto", help="horovod, ddp, ... (default: the one for this launcher)")
    p.add_argument("--run-dir", type=Path, default=Path("runs/torch_cifar10"), metavar="DIR")
    p.add_argument("--resume", action="store_true", help="resume the run in --run-dir")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""

    def work(detected: Detected) -> None:
        args = parser().parse_args(argv)
        needed = startup.torch_modules(args.engine, detected, torchvision=False)
        startup.find_modules(needed)
        startup.share_cores(detected)
        startup.import_modules(needed)
        with hvdtrain.init("torch", engine=args.engine) as world:  # +
            train(args, world)

    return startup.run_program(PROGRAM, work)


if __name__ == "__main__":
    sys.exit(main())
