"""How far off the model of `hvdtrain scale` is on this machine: a step on real ranks, beside what it predicts.

One rank trains, so do several, and as many that do not talk; others sum arrays: all in turns. From the step of one
rank and the sums the model predicts the step of several. On CPU a rank has one core, which its sums take from it: none
is hidden behind the backward pass; more ranks than cores share them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from hvdtrain.bench.comm.model import link_cost
from hvdtrain.bench.turns import train_job
from hvdtrain.bench.turns.report import begin, finish, heading, progress
from hvdtrain.bench.turns.turns import ONE_THREAD, InterleavedJobs, launched
from hvdtrain.core.errors import install_command
from hvdtrain.core.flags import whole
from hvdtrain.pipeline.plan.costs import Link
from hvdtrain.pipeline.plan.scaling import BACKWARD, BucketTiming, MeasuredStep, Network, predict
from hvdtrain.record import stats
from hvdtrain.world.startup import find_modules

SUMS = (1 << 18, 1 << 20, 5 << 20)  # bytes, from which the link is computed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain bench scale`."""
    add, count = parser.add_argument, whole(1)
    add("-np", "--ranks", type=whole(2), nargs="+", default=[2], metavar="N", help="(default: 2)")
    add("--model", default="resnet18", metavar="NAME", help="torchvision's (default: %(default)s)")
    add("--per-rank-batch", type=count, default=16, metavar="N", help="(default: %(default)s)")
    add("--pixels", type=count, default=64, metavar="N", help="side of a picture (default: %(default)s)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="(default: %(default)s)")
    add("--steps", type=count, default=4, metavar="N", help="of a turn (default: %(default)s)")
    add("--rounds", type=count, default=8, metavar="N", help="(default: %(default)s)")
    add("--out", type=Path, default=Path("bench-scale.json"), metavar="FILE", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; returns 0."""
    find_modules(dict.fromkeys(("torch", "torchvision"), install_command("torch")))
    from hvdtrain.torch.engines.horovod import USUAL_BUCKET_BYTES
    from hvdtrain.vision.classifiers import buckets_of

    buckets = buckets_of(args.model, USUAL_BUCKET_BYTES[args.device], image_size=args.pixels)
    result = begin("scale", args, "a benchmark starts its own ranks")
    result["ranks"] = {str(ranks): _one(args, ranks, buckets) for ranks in dict.fromkeys(args.ranks)}
    return finish(args, result, report)


def _one(args: argparse.Namespace, ranks: int, buckets: tuple[BucketTiming, ...]) -> dict[str, Any]:
    its = {name: getattr(args, name) for name in ("model", "device", "per_rank_batch", "pixels", "steps")}
    arms = {"1 rank": ("hvdtrain", 1), "ranks": ("hvdtrain", ranks), "no communication": ("apart", ranks)}
    with InterleavedJobs(os.environ | ONE_THREAD) as jobs:
        for name, (arm, count) in arms.items():
            progress(f"{ranks} ranks: starting {name}")
            jobs.start(name, train_job.command(arm, count, **its), count)
        sums = [sys.executable, "-m", "hvdtrain.bench.comm.job", f"--device={args.device}"]
        jobs.start("sums", [*launched(ranks, "horovodrun"), *sums], ranks)
        turns: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in arms}
        turns |= {str(size): ("sums", {"way": "horovod", "bytes": size, "repeat": 20}) for size in SUMS}
        seconds = jobs.rounds(turns, args.rounds, f"{ranks} ranks")["wall"]
    cores = len(os.sched_getaffinity(0)) if args.device == "cpu" else ranks
    return {"seconds": seconds} | compared(
        seconds, ranks, buckets, crowd=max(1.0, ranks / cores), hidden=args.device != "cpu"
    )


def compared(
    seconds: Mapping[str, list[float]], ranks: int, buckets: tuple[BucketTiming, ...], *, crowd: float, hidden: bool
) -> dict[str, Any]:
    """Predicted over measured, from one rank and from ranks that do not talk; pure.

    Args:
        seconds: round by round, of "1 rank", "ranks", "no communication", and of a sum of each of `SUMS` bytes.
        crowd: ranks a core, where they are more than one.
        hidden: sums go on beside the backward pass.
    """
    cost = link_cost("ring", {ranks: {size: median(seconds[str(size)]) for size in SUMS}})
    link = Link(cost.latency_s, 1 / cost.s_per_byte if cost.s_per_byte else float("inf"))
    network = Network(link, link, per_host=ranks)
    found: dict[str, Any] = {"link": vars(cost), "of_measured": {}, "predicted_s": {}}
    for name, times in {"1 rank": crowd, "no communication": 1.0}.items():
        alone = [its * times for its in seconds[name]]
        backward_s = BACKWARD * median(alone) if hidden else 0.0
        step = predict(MeasuredStep(tuple(alone), backward_s, buckets), network, ranks)
        # the slowest of ranks that do not talk is already what was measured of them
        more_s = step.exposed_communication_s + step.negotiation_s + (step.straggler_s if name == "1 rank" else 0.0)
        each = [its + more_s for its in alone]
        found["predicted_s"][name] = median(each)
        found["of_measured"][name] = vars(stats.ratio_of_medians(each, seconds["ranks"]))
    return found


def report(result: Mapping[str, Any]) -> str:
    """The table of a result."""
    its = result["settings"]
    what = (
        f"{its['model']}, batch {its['per_rank_batch']} a rank, {its['pixels']}x{its['pixels']} pixels, "
        f"{its['device']}; {its['rounds']} rounds of {its['steps']} steps"
    )
    rows = [("a step, predicted from", "predicted", "measured", "predicted / measured, 95 %")]
    for ranks, part in result["ranks"].items():
        measured = stats.milliseconds(part["seconds"]["ranks"])
        for name, ratio in part["of_measured"].items():
            known = "a step of 1" if name == "1 rank" else "those that do not talk"
            seconds = f"{part['predicted_s'][name] * 1e3:.2f} ms"
            rows.append((f"{ranks} ranks, from {known}, and the link", seconds, measured, str(stats.Interval(**ratio))))
    return f"{heading(what, result)}\n\n{stats.table(rows)}"
