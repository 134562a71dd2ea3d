"""How fast training is, in paired runs on this machine.

PyTorch (--framework torch): a step of hvdtrain's loop against plain PyTorch, hand-written Horovod and
DistributedDataParallel, Accelerate and Lightning Fabric; and several ranks against one.

Keras (--framework keras):
1. A prepared fit against plain Keras, both in one process, taking turns: what hvdtrain costs.
2. Several ranks against one, and against as many processes that do not talk (the limit), one thread and one core each,
   taking turns: what the ranks bring.

Everything (--all): one model in every way there is, in groups that fit into memory; with a picture. --models toy shows
in a minute or two whether all of them work here.

Settings (--tune [-- COMMAND ...]): threads, Horovod's cycle time, fusion, shared memory and controller, buckets and
(--allow-compression) float16 gradients, tried in turns for a program that trains through hvdtrain; what is faster
beyond noise goes into a file that HVDTRAIN_TUNED, or `hvdtrain launch --tuned`, names.

Prints a table and writes a JSON file with every sample. Give the machine nothing else to do.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.bench import compared, torch_train, tune
from hvdtrain.bench.torch_train import LIMIT
from hvdtrain.bench.turns.report import begin, finish, measured_on, progress, versions
from hvdtrain.bench.turns.turns import CLOCKS, ONE_THREAD, InterleavedJobs, Turns, launched
from hvdtrain.core import flags
from hvdtrain.core.errors import ConfigError
from hvdtrain.record import stats

OVERHEAD_TARGET = 1.02
SCALING_BLOCKS = 2  # of a round of part 2
DEFAULTS: dict[str, dict[str, Any]] = {
    "keras": {"per_rank_batch": 128, "steps": 20},
    "torch": {"per_rank_batch": 16, "steps": 5, "models": ["resnet18", "resnet50"]},
    "all": {"per_rank_batch": 16, "steps": 5, "models": ["resnet50"]},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain bench train`."""
    count = flags.whole(1)
    add = parser.add_argument
    add("--all", action="store_true", help="PyTorch's, Keras' and everybody's ways with one model")
    add("--framework", choices=["keras", "torch"], help="(default: keras; with --all: both)")
    add(
        "--backend",
        choices=["tensorflow", "torch"],
        help="Keras' (default: KERAS_BACKEND, else tensorflow; --all: both)",
    )
    add("--per-rank-batch", type=count, metavar="N", help="pictures (default: Keras 128, PyTorch 16)")
    add("--steps", type=count, metavar="N", help="updates in a block (default: Keras 20, PyTorch 5)")
    add("--blocks", type=count, default=10, metavar="N", help="blocks of each arm (default: %(default)s)")
    add("--ranks", "-np", type=count, default=2, metavar="N", help="in part 2; 1 leaves it out (default: %(default)s)")
    add("--rounds", type=count, default=3, metavar="N", help="of both in part 2 (default: %(default)s)")
    add("--launcher", choices=["horovodrun", "mpirun"], default="horovodrun", help="(default: %(default)s, on Gloo)")
    torch_train.add_arguments(add, count)
    add("--at-once", type=count, metavar="N", help="--all: processes in memory (default: one for each 2 GiB free)")
    add("--tune", action="store_true", help="find faster settings for COMMAND, or for a model of --models")
    add("--budget", type=flags.positive, default=300.0, metavar="S", help="--tune: seconds (default: %(default)g)")
    add("--allow-compression", action="store_true", help="--tune: try float16 gradients, too, which change results")
    add("--out", type=Path, metavar="FILE", help="(default: bench-train.json; --tune: tuned.json)")
    add("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="--tune: what every rank runs")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark of a framework; returns 0, whatever the figures are."""
    args.out = args.out or Path("tuned.json" if args.tune else "bench-train.json")
    if not args.all:
        args.framework = args.framework or ("torch" if args.tune else "keras")
    for name, value in DEFAULTS["all" if args.all else args.framework].items():
        setattr(args, name, getattr(args, name) or value)
    if args.tune:
        return tune.run(args)
    if args.argv:
        raise ConfigError("a command is what --tune tunes", " ".join(args.argv), "hvdtrain bench train --tune -- ...")
    result = begin("train", args, "a benchmark starts its own ranks")
    if args.all:
        result["compared"] = compared.measure(args)
        compared.draw(result, args.out.with_suffix(".png"))
        return finish(args, result, compared.report)
    result["framework"] = args.framework
    if args.framework == "torch":
        result["models"] = torch_train.measure(args)
        return finish(args, result, torch_train.report)
    result["backend"] = args.backend or os.environ.get("KERAS_BACKEND") or "tensorflow"
    return finish(args, result | measure(args, result["backend"]), report)


def measure(args: argparse.Namespace, backend: str) -> dict[str, Any]:
    """Keras' two parts."""
    command = [
        sys.executable, "-m", "hvdtrain.bench.keras_job", f"--backend={backend}", f"--steps={args.steps}",
        f"--per-rank-batch={args.per_rank_batch}",
    ]  # fmt: skip
    with InterleavedJobs(os.environ | ONE_THREAD) as jobs:
        progress(f"1/2 prepared fit against plain Keras, one process, blocks of {args.steps} updates")
        jobs.start("1", command, 1)
        found = {"overhead": overhead(jobs, args.blocks)}
        if args.ranks > 1:
            progress(f"2/2 {args.ranks} ranks against 1")
            jobs.start(str(args.ranks), [*launched(args.ranks, args.launcher), *command], args.ranks)
            found["scaling"] = scaling(jobs, args.ranks, args.rounds * SCALING_BLOCKS)
    return found


def overhead(jobs: InterleavedJobs, blocks: int) -> dict[str, Any]:
    """Part 1: seconds a step by block, of both, and the ratio of pairs; by wall clock and by CPU time."""
    turns: Turns = {arm: ("1", {"arm": arm}) for arm in ("prepared", "plain")}
    jobs.rounds(turns, 1, "warming up")  # traces and compiles
    seconds = jobs.rounds(turns, blocks, "one process")
    wall, cpu = (stats.ratio_of_medians(seconds[clock]["prepared"], seconds[clock]["plain"]) for clock in CLOCKS)
    return {
        "seconds_per_step": seconds["wall"], "cpu_seconds_per_step": seconds["cpu"],
        "ratio": vars(wall), "cpu_ratio": vars(cpu), "target": OVERHEAD_TARGET,
    }  # fmt: skip


def scaling(jobs: InterleavedJobs, ranks: int, blocks: int) -> dict[str, Any]:
    """Part 2: seconds a step by block, of one rank, of several, and of several that train plain Keras each for itself;
    how much faster than the one the several are, and how near to those."""
    several = str(ranks)
    turns: Turns = {
        "1": ("1", {"arm": "prepared"}), several: (several, {"arm": "prepared"}), LIMIT: (several, {"arm": "plain"}),
    }  # fmt: skip
    jobs.rounds(turns, 1, "warming up")
    seconds = jobs.rounds(turns, blocks, f"1 and {ranks} ranks")["wall"]
    speedup = stats.ratio_of_medians(seconds["1"], seconds[several])
    return {
        "ranks": ranks,
        "seconds_per_step": seconds,
        "oversubscribed": ranks > len(os.sched_getaffinity(0)),
        "efficiency": vars(stats.ratio_of_medians(seconds[LIMIT], seconds[several])),
        "speedup": {key: value * ranks for key, value in vars(speedup).items()},
    }


def report(result: Mapping[str, Any]) -> str:
    """The table of a result."""
    part = result["overhead"]
    ratio, cpu_ratio = stats.Interval(**part["ratio"]), stats.Interval(**part["cpu_ratio"])
    steps, cpu = part["seconds_per_step"], part["cpu_seconds_per_step"]
    rows: list[tuple[str, ...]] = [
        ("one process", "step (median)", "ratio, 95 %", f"target <= {part['target']}", "CPU time", "ratio, 95 %"),
        ("plain Keras", stats.milliseconds(steps["plain"]), "1", "", stats.milliseconds(cpu["plain"]), "1"),
        (
            "prepared", stats.milliseconds(steps["prepared"]), str(ratio), stats.kept(ratio.value <= part["target"]),
            stats.milliseconds(cpu["prepared"]), str(cpu_ratio),
        ),
    ]  # fmt: skip
    batch = result["settings"]["per_rank_batch"]
    heading = f"MNIST network, batch {batch} a rank, Keras on {result['backend']}\n{measured_on(result)}"
    tables = [f"{heading}\n{versions(result)}", stats.table(rows)]
    if "scaling" in result:
        part = result["scaling"]
        ranks, steps = part["ranks"], part["seconds_per_step"]
        speedup, efficiency = stats.Interval(**part["speedup"]), stats.Interval(**part["efficiency"])
        note = " (ranks share cores)" if part["oversubscribed"] else ""
        rows = [
            (f"one thread, one core a rank{note}", "step (median)", "speed-up, 95 %", "efficiency, 95 %"),
            ("1 rank", stats.milliseconds(steps["1"]), "1", ""),
            (f"{ranks} ranks", stats.milliseconds(steps[str(ranks)]), str(speedup), str(efficiency)),
            (f"{ranks} processes, {LIMIT}", stats.milliseconds(steps[LIMIT]), "", "1"),
        ]
        tables.append(stats.table(rows))
    return "\n\n".join(tables)
