"""CIFAR-10 with a small CNN, from one process to many. "# +": added by hvdtrain.

horovodrun -np 2 python examples/cifar10.py

Data that is not there is downloaded. Offline, `--data digits` takes real digits as pictures of 3x32x32.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import nn

import hvdtrain  # +
import hvdtrain.torch as hvt  # +
from hvdtrain.datasets import load_cifar10, load_digits

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
text = "PATH: its archive or a folder with it (default: cifar10, from the cache or downloaded)"
p.add_argument("--data", default="cifar10", metavar="cifar10|digits|PATH", help=text)
p.add_argument("--epochs", type=int, default=10)
p.add_argument("--per-rank-batch", type=int, default=32)
p.add_argument("--lr", type=float, default=0.01, help="at batch 32")
p.add_argument("--amp", choices=["bf16", "fp16"], help="mixed precision (default: none)")
p.add_argument("--engine", default="auto", help="horovod, ddp, ... (default: the one for this launcher)")
p.add_argument("--run-dir", type=Path, default=Path("runs/cifar10"))
p.add_argument("--resume", action="store_true", help="resume the run in --run-dir")
args = p.parse_args()

started = time.perf_counter()
with hvdtrain.init("torch", engine=args.engine) as world:  # +
    digits = args.data == "digits"
    images = load_digits() if digits else load_cifar10(args.data, world=world)
    model = nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
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
    with hvdtrain.RunLog(args.run_dir, world, config={**vars(args), "lr": rate}, resume=args.resume) as run:  # +
        checkpoints.run = run  # +
        checkpoints.on_preemption(hvt.model_state(model, optimizer, batches))  # + preempted, it saves first
        if args.resume:
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
        if world.is_main:  # + one of them prints; the run log prints last where the time went
            took = f"{time.perf_counter() - started:.1f} s in all"
            batch = f"{args.per_rank_batch * world.size} pictures an update"
            print(f"{images.note}\ntop-1 {scores['top1']:.4f}; {batch}, {took}", flush=True)
