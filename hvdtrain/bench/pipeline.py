"""A split model on CPU stages of one core each, against the naive split and other pipelines, in rounds that take turns.

Every variant trains the same model on the same batch, forward and backward, cut at the same place. A variant that
cannot use a core for each stage runs on all cores at once, as it uses them best.

Prints a table and writes a JSON file with every sample. Give the machine nothing else to do.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from hvdtrain.bench.turns.turns import begin, finish, measured_on, progress
from hvdtrain.core.errors import ConfigError, HvdtrainError
from hvdtrain.core.flags import whole
from hvdtrain.core.launchers import detect
from hvdtrain.pipeline.plan.schedule import SCHEDULES
from hvdtrain.record import stats
from hvdtrain.vision import trials
from hvdtrain.world.resources import keep_freed_memory
from hvdtrain.world.startup import share_cores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain bench pipeline`."""
    count = whole(1)
    add = parser.add_argument
    add("--model", default="resnet50", metavar="NAME", help="a model of torchvision (default: %(default)s)")
    add("--batch", type=count, default=64, metavar="N", help="pictures in a batch (default: %(default)s)")
    add("--image-size", type=count, default=128, metavar="N", help="(default: %(default)s)")
    add("--stages", type=count, default=2, metavar="N", help="(default: %(default)s)")
    add("--micro-batches", type=count, nargs="+", default=[4, 8], metavar="N", help="(default: 4 8)")
    add("--schedules", choices=SCHEDULES, nargs="+", default=list(SCHEDULES), help="(default: gpipe 1f1b)")
    add("--balance", type=count, nargs="+", metavar="N", help="segments of each stage (default: by measured time)")
    add("--rounds", type=count, default=6, metavar="N", help="(default: %(default)s)")
    add("--out", type=Path, default=Path("bench-pipeline.json"), metavar="FILE", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; returns 0."""
    cores = sorted(os.sched_getaffinity(0))
    used = cores[: args.stages]
    if not 2 <= args.stages == len(used):
        received = f"{len(cores)} core(s) for {args.stages} stage(s)"
        raise ConfigError("--stages must be at least 2, and each stage needs a core", received, "--stages 2")
    result = begin("pipeline", args, "this benchmark is one process")
    share_cores(detect(os.environ))  # before PyTorch is imported
    keep_freed_memory()  # before a model is built, as `hvdtrain.init` does for programs
    import torch

    torch.set_num_threads(len(used))
    os.sched_setaffinity(0, used)
    try:
        measure(args, result, used)
    finally:
        os.sched_setaffinity(0, cores)
    return finish(args, result, report)


def measure(args: argparse.Namespace, result: dict[str, Any], cores: Sequence[int]) -> None:
    """Builds the variants, runs them in turns."""
    first = args.micro_batches[0]
    its = trials.TrialSettings(args.batch, args.image_size, 1000, 1, args.rounds, "cross-entropy", first)
    progress("measuring the segments, to cut the model")
    cut = {"micro_batches": first, "balance": args.balance or "time"}
    job = trials.SplitJob.made(args.model, its, ["cpu"] * args.stages, **cut)
    result["cut"] = [{"name": stage.name, "segments": len(stage.segments)} for stage in job.pipe.stages]
    variants = trials.usual(job)
    for count, schedule in itertools.product(args.micro_batches, args.schedules):
        name = f"hvdtrain, {schedule}, {count} micro-batches"
        variants[name] = job.variant(job.pipe, schedule=schedule, micro_batches=count)
    for count in args.micro_batches if args.stages == 2 else ():
        step = partial(plain_step, partial(tutorial, job.pipe.stages, count))
        name = f"tutorial pattern, {count} micro-batches, {len(cores)} threads an operation"
        variants[name] = job.variant(SimpleNamespace(step=step, parameters=job.pipe.parameters), cores=cores)
    progress(f"{len(variants)} variants, {args.rounds} rounds")
    measured = job.interleaved(variants, "pipeline")
    for name, reason in measured["failed"].items():
        raise HvdtrainError(f"the variant {name} did not run", reason)
    result["seconds"] = measured["seconds"]


def plain_step(forward: Callable[[Any], Any], x: Any, y: Any, loss: Callable[[Any, Any], Any]) -> None:
    """Runs forward and backward pass of a batch."""
    loss(forward(x), y).backward()


def tutorial(stages: Sequence[Any], count: int, x: Any) -> Any:
    """Runs the pipeline of PyTorch's model-parallel tutorial: it calls the second stage on a split before the first on
    the next one. If calls return only when the device is done, nothing overlaps."""
    import torch

    first, second = stages
    splits = iter(x.tensor_split(count))
    between = first((next(splits),))
    outputs = []
    for split in splits:
        outputs.append(second(between)[0])
        between = first((split,))
    outputs.append(second(between)[0])
    return torch.cat(outputs)


# ---- the tables


def report(result: Mapping[str, Any]) -> str:
    """The table of a result, and how efficient each of our pipelines is."""
    its, machine, seconds = result["settings"], result["machine"], result["seconds"]
    cut = " | ".join(f"{stage['name']} ({stage['segments']} segments)" for stage in result["cut"])
    ours = [name for name in seconds if name.startswith("hvdtrain")]
    best = min(ours, key=lambda name: median(seconds[name]))
    return "\n\n".join(
        [
            f"{its['model']}, batch {its['batch']} of {its['image_size']}x{its['image_size']},"
            f" {its['stages']} stage(s) on {min(its['stages'], machine['cores_usable'])} core(s): {cut}\n"
            f"{measured_on(result)}; torch {machine['versions']['torch']}",
            f"seconds of a step; the pipeline: {best}",
            trials.table(seconds, trials.ratios_of(seconds, best)),
            "efficiency: (naive split / stages) / pipeline / (m / (m + stages - 1)), m micro-batches",
            "\n".join(f"{name}: {efficiency(result, name):.3f}" for name in ours),
        ]
    )


def efficiency(result: Mapping[str, Any], name: str) -> float:
    """Returns the speed-up over the naive split, as a share of the one that the schedule's bubble allows."""
    stages, count = result["settings"]["stages"], int(name.split()[-2])
    ratio = stats.ratio_of_medians(result["seconds"][trials.NAIVE], result["seconds"][name]).value
    return ratio / stages / (count / (count + stages - 1))
