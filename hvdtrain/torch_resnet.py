"""Any of torchvision's classifiers on any number of ranks, under any engine, by the ImageNet-in-1-hour recipe.

Read it from top to bottom: the training; then the flags, and what has to happen before a framework is imported. What
is right for each data set is in `vision.recipes`, the models are in `vision.classifiers`, the pictures in
`vision.pictures`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hvdtrain
from hvdtrain.comm.engines import ENGINES
from hvdtrain.core import flags
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.launchers import Detected
from hvdtrain.pipeline.plan.schedule import REMATS, SCHEDULES
from hvdtrain.record import folder
from hvdtrain.record.bottleneck import RunFacts
from hvdtrain.vision import pictures, pipelines
from hvdtrain.vision.recipes import RECIPES, Settings
from hvdtrain.world import startup
from hvdtrain.world.resources import usable_cores
from hvdtrain.world.world import World

if TYPE_CHECKING:
    import torch


PROGRAM = "hvdtrain.torch_resnet"
BEST = "top1"


# ---- the training


def train(args: argparse.Namespace, world: World) -> None:
    """Trains, tests and reports. Every rank runs all of it; rank 0 prints and writes."""
    from hvdtrain.vision import classifiers

    started = time.perf_counter()
    classifiers.check_name(args.model)
    data = pictures.load(args.data, world=world, image_size=args.image_size, strict=args.strict)
    recipe = RECIPES[data.recipe]
    plan = Settings.of(args, world.size, recipe, samples=data.samples)
    network = classifiers.build(args.model, data.classes, image_size=data.image_size, stem=recipe.stem)
    pipe, plan = pipelines.apply(args, plan, network, data.image_size, world)
    run_dir, args.resume = world.on_main(
        folder.choose_run, args.run_dir, "torch_resnet", resume=args.resume, data_sha256=data.sha256
    )
    config = {**vars(args), **vars(plan), "data": data.note, "data_sha256": data.sha256}
    config["stages"] = None if pipe is None else pipe.extra_repr()
    with hvdtrain.RunLog(run_dir, world, config=config, resume=args.resume) as run:
        if world.is_main:
            print(f"data: {data.note}\nranks: {world.size} ({world.launcher}, {world.engine})", flush=True)
            stages = "" if pipe is None else f"\npipeline: {pipe.extra_repr()}"
            print(f"model: {args.model}, {data.classes} classes{stages}\n{plan}\nrun directory: {run_dir}", flush=True)
        job = prepare(args, plan, data, network if pipe is None else pipe, run)
        restore(args, plan, job, world)
        scores = fit(args, plan, job, run)
        run.result(seconds=time.perf_counter() - started)
        conclude(args, plan, job, scores, run, world)


@dataclass(frozen=True)
class ResNetJob:
    """A training's objects: the model, its data, and its checkpoints."""

    model: torch.nn.Module
    optimizer: Any
    batches: Any
    held_out: Any
    loss: torch.nn.Module
    data: pictures.ImageData
    checkpoints: hvdtrain.Checkpointer

    def state(self) -> Mapping[str, Any]:
        """The files of a checkpoint."""
        import hvdtrain.torch as hvt

        return hvt.model_state(self.model, self.optimizer, self.batches)

    def scores(self) -> dict[str, float]:
        """Evaluates the held-out pictures, each counted once: loss, top1 and, with more than 5 classes, top5."""
        import hvdtrain.torch as hvt

        metrics = hvt.classification(top=(1, 5) if self.data.classes > 5 else (1,))
        return hvt.evaluate(self.model, self.held_out, metrics)


def prepare(
    args: argparse.Namespace, plan: Settings, data: pictures.ImageData, network: torch.nn.Module, run: hvdtrain.RunLog
) -> ResNetJob:
    """Makes everything that training needs."""
    import torch

    import hvdtrain.torch as hvt
    from hvdtrain.vision.classifiers import parameter_groups

    workers: Any = "auto" if args.workers is None else args.workers
    batches = hvt.loader(data.train, plan.per_rank_batch, augment=data.augment, workers=workers)
    held_out = hvt.loader(data.val, plan.per_rank_batch, augment=data.val_augment, workers=workers, shuffle=False)
    groups = parameter_groups(network, plan.weight_decay)
    base: torch.optim.Optimizer  # at the base rate: `hvt.prepare` scales it
    if plan.optimizer == "adamw":
        base = torch.optim.AdamW(groups, lr=plan.lr.base)
    else:
        base = torch.optim.SGD(groups, lr=plan.lr.base, momentum=0.9, nesterov=plan.optimizer == "nesterov")
    compiled: Any = torch.compile(network) if args.compile else network
    model, optimizer = hvt.prepare(
        compiled,
        base,
        batches,
        lr=plan.lr,
        accumulate=plan.accumulate,
        clip=args.clip,
        amp=args.amp,
        compression=args.compression,
        sync_batchnorm=args.sync_batchnorm,
        channels_last=args.channels_last,
        watch_every=args.watch_every,
        zero=args.zero,
    )
    checkpoints = hvdtrain.Checkpointer(run.path("checkpoints"), best=BEST, mode="max", run=run)
    loss = torch.nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    return ResNetJob(model, optimizer, batches, held_out, loss, data, checkpoints)


def restore(args: argparse.Namespace, plan: Settings, job: ResNetJob, world: World) -> None:
    """Goes on where a run stopped, or starts from another run's weights."""
    job.checkpoints.on_preemption(job.state())
    progress = job.checkpoints.restore(job.state()) if args.resume else None
    if args.resume and world.is_main:
        seen = progress.samples_seen if progress else 0
        print(f"resuming after {seen:,} of {plan.total_samples:,} samples", flush=True)
    if progress is None and args.weights is not None:  # a job may be started again before its first checkpoint
        weights = {name: part for name, part in job.state().items() if name == "model.safetensors"}
        job.checkpoints.restore(weights, which=args.weights)
        if world.is_main:
            print(f"starting from the weights of {args.weights}", flush=True)


def fit(args: argparse.Namespace, plan: Settings, job: ResNetJob, run: hvdtrain.RunLog) -> dict[str, float]:
    """The loop; returns the scores of the held-out pictures at its end."""
    scores: dict[str, float] | None = None
    for epoch in job.batches.epochs(plan.epochs):
        began = time.perf_counter()
        job.model.train()
        for images, labels in job.batches:
            job.optimizer.zero_grad()
            job.optimizer.forward_backward(images, labels, job.loss)  # of a model that is whole, or cut into stages
            job.optimizer.step()
            record = job.optimizer.record()
            run.step(**record)
            updated = record["samples"] > 0  # else the batch is one of several of an update
            if args.save_every and updated and record["step"] % args.save_every == 0:
                job.checkpoints.save(job.state(), progress=job.optimizer.progress)
        scores = job.scores()
        job.checkpoints.save(job.state(), progress=job.optimizer.progress, metrics=scores)
        run.epoch(epoch, scores, time.perf_counter() - began, job.optimizer.phases())
    return scores or job.scores()


def conclude(
    args: argparse.Namespace,
    plan: Settings,
    job: ResNetJob,
    scores: dict[str, float],
    run: hvdtrain.RunLog,
    world: World,
) -> None:
    """Proves that the replicas are equal, and prints how the training ended; collective."""
    import torch

    import hvdtrain.torch as hvt

    workers = None if job.data.in_memory else job.batches.workers
    threads = 1 if world.devices else torch.get_num_threads()
    free_cores = max(0, int(usable_cores(world)) - threads - (workers or 0)) * world.local_size
    weights = hvt.fingerprint(job.model)
    world.agree("the final weights (SHA-256)", weights)
    unread = job.held_out.all_skipped()
    skipped = [*job.batches.all_skipped(), *unread]
    run.result(**scores, weights_sha256=weights, skipped=[name for name, _ in skipped])
    if not world.is_main:
        return
    run.facts = RunFacts(workers, free_cores, world.local_size, args.compression, plan.accumulate)
    if skipped:
        first = "".join(f"\n  {name}: {reason}" for name, reason in skipped[:5])
        print(f"skipped: {len(skipped)} picture{'s' * (len(skipped) > 1)} that cannot be read{first}")
    last, best = job.checkpoints.latest(), job.checkpoints.best()
    if last and best:
        print(f"checkpoints: last {last.path}, best {best.path} (top-1 {best.metrics[BEST]:.4f})")
    print(f"weights: bit-equal on {world.size} rank{'s' * (world.size > 1)}, sha256 {weights[:16]}")
    top5 = f", top-5 {scores['top5']:.4f}" if "top5" in scores else ""
    tested = job.data.val_samples - len(unread)
    right = f"{round(scores['top1'] * tested)} of {tested} right"
    print(f"loss {scores['loss']:.4f}, top-1 {scores['top1']:.4f} ({right}){top5}", flush=True)


# ---- the flags, and what happens before a framework is imported

EXAMPLES = """\
examples:
  python -m hvdtrain.torch_resnet --model resnet18                       one process; needs no Horovod
  horovodrun -np 2 python -m hvdtrain.torch_resnet --model resnet18      two ranks on this machine
  horovodrun -np 16 -H server1:4,server2:4,server3:4,server4:4 python -m hvdtrain.torch_resnet --data /data/imagenet
  torchrun --nproc-per-node 2 -m hvdtrain.torch_resnet --engine ddp --data cifar10
  python -m hvdtrain.torch_resnet --resume --epochs 20                   the newest run continues
  horovodrun -np 2 python -m hvdtrain.torch_resnet --pipeline 2          each rank cuts the model over 2 of its devices
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = flags.Parser(PROGRAM, description=(__doc__ or "").split("\n", 1)[0], epilog=EXAMPLES)
    count, number = flags.whole(1), flags.positive
    # fmt: off
    add = p.add_argument_group("training (defaults follow the data: see hvdtrain/vision/recipes.py)").add_argument
    add("--model", default="resnet50", metavar="NAME", help="any classifier of torchvision (default: %(default)s)")
    add("--epochs", type=count, metavar="N", help="epochs over all ranks")
    add("--per-rank-batch", type=count, metavar="N", help="pictures of a rank in a batch")
    add("--accumulate", type=count, default=1, metavar="N", help="batches of one update (default: 1)")
    add("--optimizer", choices=["sgd", "nesterov", "adamw"], help="SGD with momentum, with Nesterov momentum, or AdamW")
    add("--lr", type=number, metavar="RATE",
        help="learning rate at the reference batch of the recipe; it is scaled to the real batch")
    add("--schedule", choices=["step", "cosine"], help="schedule of the learning rate")
    add("--warmup-epochs", type=flags.at_least_0, metavar="N", help="epochs until the scaled learning rate is reached")
    add("--weight-decay", type=flags.at_least_0, metavar="X", help="weight decay, without batch norm and biases")
    add("--label-smoothing", type=flags.at_least_0, default=0.0, metavar="X", help="label smoothing (default: 0)")
    add("--clip", type=number, metavar="NORM", help="maximum norm of the averaged gradient (default: no clipping)")
    add("--amp", choices=["bf16", "fp16"], help="mixed precision (default: none)")
    add("--sync-batchnorm", action="store_true", help="batch norm over the batch of all ranks")
    add("--seed", type=flags.whole(0), default=0, metavar="N", help="seed of all random numbers (default: 0)")
    add = p.add_argument_group("data and files").add_argument
    add("--data", default="auto", metavar="auto|digits|cifar10|mnist|synthetic|DIR",
        help="DIR: ImageNet's layout, train/CLASS/*.jpg and val/CLASS/*.jpg; auto: the digits, 1,797 real ones, built"
             " in (default: auto)")
    add("--image-size", type=flags.whole(8), metavar="N", help="side in pixels, for DIR and synthetic (default: 224)")
    add("--workers", type=flags.whole(0), metavar="N", help="loader processes of a rank (default: as many as fit)")
    add("--strict", action="store_true", help="refuse pictures that cannot be read, instead of skipping them")
    add("--run-dir", type=Path, metavar="DIR",
        help="folder for log and checkpoints (default: the next runs/torch_resnet-N)")
    add("--resume", action="store_true", help="resume the run in --run-dir (default: the newest)")
    add("--weights", type=Path, metavar="DIR", help="start from the weights of a checkpoint")
    add("--save-every", type=flags.whole(0), default=0, metavar="N",
        help="updates between checkpoints (default: one after each epoch)")
    add = p.add_argument_group("machine").add_argument
    add("--engine", choices=["auto", *ENGINES], default="auto",
        help="engine that connects the ranks (default: the one for this launcher)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto",
        help="device to train on (default: GPUs if there are any)")
    add("--gpus-per-rank", type=count, default=1, metavar="N",
        help="GPUs of a rank, for --pipeline (default: its stages) and --engine dataparallel (default: all)")
    add("--compression", choices=["fp16", "bf16"], help="compression of gradients on their way (default: none)")
    add("--zero", type=int, choices=[0, 1], default=0,
        help="1: with --engine ddp or deepspeed, split the optimizer's state over the ranks (default: 0)")
    add("--channels-last", action="store_true", help="memory layout that GPUs prefer for mixed precision")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    add("--watch-every", type=flags.whole(0), default=100, metavar="N",
        help="steps between comparisons of the replicas; 0: never (default: %(default)s)")
    add = p.add_argument_group("a model cut into stages, over the devices of each rank").add_argument
    add("--pipeline", type=pipelines.devices_of_stages, metavar="N|DEVICES",
        help="number of stages, or their devices: cpu,cpu or cuda:0,cuda:1")
    add("--micro-batches", type=pipelines.micro_batches, metavar="auto|N",
        help="micro-batches of a batch (default: auto, the fastest by measured times)")
    add("--pipeline-schedule", choices=SCHEDULES, help="schedule of the pipeline (default: 1f1b)")
    add("--remat", choices=REMATS, help="recompute activations instead of keeping them (default: never)")
    add("--plan", choices=["auto"], help="measure, and choose cut, micro-batches and accumulation")
    # fmt: on
    return p


def check_flags(args: argparse.Namespace) -> None:
    """Refuses flags that contradict each other."""
    if args.resume and args.weights is not None:
        received = f"--resume --weights {args.weights}"
        rule = "--resume and --weights cannot be combined: a resumed run has its own weights"
        raise ConfigError(rule, received, "remove one of them", shared=True)
    pipelines.check_flags(args)


def check_early(args: argparse.Namespace, detected: Detected) -> None:
    """Refuses bad data and run directories before the seconds that a framework takes: one rank of each node looks."""
    if detected.local_rank == 0:
        pictures.check(args.data)
    if detected.rank == 0 and args.run_dir is not None:
        folder.check_run_dir(args.run_dir, resume=args.resume)
    if detected.rank == 0 and args.weights is not None and not args.weights.is_dir():
        received = f"{args.weights}: no such folder"
        raise ConfigError("--weights must be a checkpoint's folder", received, "name one: RUN/checkpoints/epoch-...")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code (2: something was refused; one message explains it)."""

    def work(detected: Detected) -> None:
        args = parser().parse_args(argv)
        check_flags(args)
        needed = startup.torch_modules(args.engine, detected)
        startup.find_modules(needed)
        check_early(args, detected)
        startup.share_cores(detected)
        startup.import_modules(needed)
        device, gpus = pipelines.device(args), pipelines.gpus_per_rank(args)
        with hvdtrain.init("torch", engine=args.engine, device=device, gpus_per_rank=gpus, seed=args.seed) as world:
            train(args, world)

    return startup.run_program(PROGRAM, work)


if __name__ == "__main__":
    sys.exit(main())
