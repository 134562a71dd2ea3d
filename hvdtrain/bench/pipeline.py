"""A split model on CPU stages of one core each, against the naive split and the pipeline of PyTorch's tutorial.

All variants take turns, in rounds. Each trains the same model on the same batch, forward and backward, cut at the same
place. A variant that cannot use a core for each stage runs on all cores at once, as it uses them best.

Prints a table and writes a JSON file with every sample. Give the machine nothing else to do.
"""

from __future__ import annotations

import argparse
import copy
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

NAIVE, PLAIN, ALL_CORES = "naive split", "plain model, 1 core", "plain model, all cores"
ONE_STAGE, TUTORIAL = "pipeline of 1 stage, 1 core", "tutorial pattern"


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
    its = trials.TrialSettings(args.batch, args.image_size, 1000, 1, args.rounds, "cross-entropy", None, first)
    progress("measuring the segments, to cut the model")
    cut = {"micro_batches": first, "balance": args.balance or "time"}
    job = trials.SplitJob.made(args.model, its, ["cpu"] * args.stages, **cut)
    pipe = job.pipe
    result["cut"] = [{"name": stage.name, "segments": len(stage.segments)} for stage in pipe.stages]
    variants = all_variants(args, job, cores)
    progress(f"{len(variants)} variants, {args.rounds} rounds")
    measured = job.interleaved(variants, "pipeline")
    for name, reason in measured["failed"].items():
        raise HvdtrainError(f"the variant {name} did not run", reason)
    result["seconds"] = measured["seconds"]


def settings_of_ours(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The pipelines of hvdtrain: what is set for each."""
    return {
        f"hvdtrain, {schedule}, {count} micro-batches": {"schedule": schedule, "micro_batches": count}
        for schedule, count in itertools.product(args.schedules, args.micro_batches)
    }


def all_variants(args: argparse.Namespace, job: trials.SplitJob, cores: Sequence[int]) -> trials.Variants:
    """Returns the variants that take turns, by name."""
    import hvdtrain.pipeline
    from hvdtrain.pipeline.tuning.unsplit import Unsplit

    pipe, variant = job.pipe, job.variant
    one = hvdtrain.pipeline.split(
        copy.deepcopy(pipe.module), job.batches[0][0], ["cpu"], micro_batches=1, balance=[len(pipe.segments)]
    )
    found = {
        PLAIN: variant(Unsplit(pipe.module, "cpu", cores=cores[:1])),
        ONE_STAGE: variant(one, cores=cores[:1]),
        ALL_CORES: variant(Unsplit(pipe.module, "cpu", cores=cores)),
        NAIVE: variant(pipe, micro_batches=1),
    }
    found |= {name: variant(pipe, **change) for name, change in settings_of_ours(args).items()}
    for count in args.micro_batches if len(pipe.stages) == 2 else ():
        forward = partial(tutorial, pipe.stages, count)
        rival = SimpleNamespace(step=partial(plain_step, forward), parameters=pipe.parameters)
        found[f"{TUTORIAL}, {count} micro-batches, {len(cores)} threads an operation"] = variant(rival, cores=cores)
    return found


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
    """The tables of a result."""
    its, machine, seconds = result["settings"], result["machine"], result["seconds"]
    cut = " | ".join(f"{stage['name']} ({stage['segments']} segments)" for stage in result["cut"])
    rows = [("one step", "median", f"x {NAIVE}, 95 %", "efficiency")]
    for name, samples in seconds.items():
        ratio = stats.ratio_of_medians(samples, seconds[NAIVE])
        share = f"{efficiency(result, name):.3f}" if name.startswith("hvdtrain") else ""
        rows.append((name, stats.milliseconds(samples), str(ratio) if name != NAIVE else "1", share))
    return "\n\n".join(
        [
            f"{its['model']}, batch {its['batch']} of {its['image_size']}x{its['image_size']},"
            f" {its['stages']} stage(s) on {min(its['stages'], machine['cores_usable'])} core(s): {cut}\n"
            f"{measured_on(result)}; torch {machine['versions']['torch']}",
            stats.table(rows),
            "efficiency: (naive split / stages) / pipeline / (m / (m + stages - 1)), m micro-batches",
            "\n".join(comparisons(result)),
        ]
    )


def efficiency(result: Mapping[str, Any], name: str) -> float:
    """Returns the speed-up over the naive split, as a share of the one that the schedule's bubble allows."""
    stages, count = result["settings"]["stages"], count_of(name)
    ratio = stats.ratio_of_medians(result["seconds"][NAIVE], result["seconds"][name]).value
    return ratio / stages / (count / (count + stages - 1))


def count_of(name: str) -> int:
    """The micro-batches in a variant's name."""
    words = name.replace(",", "").split()
    return int(words[words.index("micro-batches") - 1])


def comparisons(result: Mapping[str, Any]) -> list[str]:
    """Returns ratios of the variants that are to be compared."""
    seconds = result["seconds"]
    ours = {name: its for name, its in seconds.items() if name.startswith("hvdtrain")}
    best = min(ours, key=lambda name: median(ours[name]))
    pairs = [(best, NAIVE), (ONE_STAGE, PLAIN), (best, ALL_CORES)]
    for name in seconds:
        if name.startswith(TUTORIAL):
            same = [mine for mine in ours if count_of(mine) == count_of(name)]
            pairs.append((min(same, key=lambda mine: median(ours[mine])), name))
    return [f"{above} / {below}: {stats.ratio_of_medians(seconds[above], seconds[below])}" for above, below in pairs]
