"""How fast training is, in paired runs on this machine.

PyTorch (--framework torch): a step of hvdtrain's loop against plain PyTorch, hand-written Horovod and
DistributedDataParallel, Accelerate and Lightning Fabric; and several ranks against one, and against as many processes
of hvdtrain that do not talk: efficiency is their time over an arm's. One thread and one core a rank on CPU.

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
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from hvdtrain.bench import compared, tune
from hvdtrain.bench.torch_job import NEEDS
from hvdtrain.bench.turns.report import begin, finish, heading, progress
from hvdtrain.bench.turns.turns import CLOCKS, ONE_THREAD, InterleavedJobs, Turns, launched, torch_command
from hvdtrain.core import flags
from hvdtrain.core.errors import ConfigError, install_command
from hvdtrain.record import stats

LIMIT = "no communication"
OVERHEAD_TARGET = 1.02
# what PyTorch runs on several ranks, hvdtrain first; hand-written loops: the fastest of them is the measure
PEERS, HAND_WRITTEN = ("hvdtrain", "horovod", "ddp", "accelerate", "fabric"), ("horovod", "ddp")
ALONE = {"plain PyTorch, 1 process": "alone", "hvdtrain, 1 process": "hvdtrain"}
TORCH_OVERHEAD_TARGET, TORCH_TARGET, EFFICIENCY_GOAL = 1.01, 1.00, 0.92
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
    backend = "Keras' (default: KERAS_BACKEND, else tensorflow; --all: both)"
    add("--backend", choices=["tensorflow", "torch"], help=backend)
    add("--per-rank-batch", type=count, metavar="N", help="pictures (default: Keras 128, PyTorch 16)")
    add("--steps", type=count, metavar="N", help="updates in a block (default: Keras 20, PyTorch 5)")
    add("--blocks", type=count, default=10, metavar="N", help="blocks of each arm (default: %(default)s)")
    add("--ranks", "-np", type=count, default=2, metavar="N", help="in part 2; 1 leaves it out (default: %(default)s)")
    add("--rounds", type=count, default=3, metavar="N", help="of both in part 2 (default: %(default)s)")
    add("--launcher", choices=["horovodrun", "mpirun"], default="horovodrun", help="(default: %(default)s, on Gloo)")
    models = "torch: torchvision's (default: resnet18 resnet50; --all: resnet50)"
    add("--models", nargs="+", metavar="NAME", help=models)
    add("--pixels", type=count, default=64, metavar="N", help="torch: side of a picture (default: %(default)s)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="torch: (default: %(default)s)")
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
        result["models"] = {model: measure_torch(args, model) for model in args.models}
        return finish(args, result, torch_report)
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


def measure_torch(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """One model in every way that is here; returns the part of the result that `torch_report` reads."""
    peers = [peer for peer in PEERS if peer not in NEEDS or importlib.util.find_spec(NEEDS[peer])] * (args.ranks > 1)
    for peer in set(PEERS) - set(peers) if args.ranks > 1 else ():
        progress(f"skipped, not installed: {peer} ({install_command('dev')})")
    arms = {label: (arm, 1) for label, arm in ALONE.items()} | {peer: (peer, args.ranks) for peer in peers}
    if args.ranks > 1:
        arms[LIMIT] = ("apart", args.ranks)
    its = {name: getattr(args, name) for name in ("device", "per_rank_batch", "pixels")}
    with InterleavedJobs(os.environ | ONE_THREAD) as jobs:
        for name, (arm, ranks) in arms.items():
            progress(f"{model}: starting {name}")
            jobs.start(name, torch_command(arm, ranks, model=model, **its), ranks)
        seconds = jobs.rounds({name: (name, {"steps": args.steps}) for name in arms}, args.blocks, model)
    steps = {"seconds_per_step": seconds["wall"], "cpu_seconds_per_step": seconds["cpu"]}
    return {"ranks": args.ranks} | steps | torch_ratios(seconds["wall"])


def torch_ratios(wall: Mapping[str, list[float]]) -> dict[str, Any]:
    """hvdtrain's step against each arm's, and what the ranks bring."""

    def ratio(above: str, below: str) -> dict[str, float]:
        return vars(stats.ratio_of_medians(wall[above], wall[below]))

    plain, alone = ALONE
    found: dict[str, Any] = {"overhead": ratio(alone, plain)}
    if peers := [name for name in wall if name in PEERS]:
        found["against"] = {peer: ratio("hvdtrain", peer) for peer in peers if peer != "hvdtrain"}
        found["efficiency"] = {peer: ratio(LIMIT, peer) for peer in peers}
    return found


# ---- the reports


def report(result: Mapping[str, Any]) -> str:
    """The tables of Keras' part."""
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
    what = f"MNIST network, batch {batch} a rank, Keras on {result['backend']}"
    tables = [heading(what, result), stats.table(rows)]
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


def torch_report(result: Mapping[str, Any]) -> str:
    """The tables of PyTorch's part."""
    its = result["settings"]
    what = (
        f"batch {its['per_rank_batch']} a rank, {its['pixels']}x{its['pixels']} pixels, {its['device']},"
        f" one thread and one core a rank; {its['blocks']} rounds of {its['steps']} steps"
    )
    tables = [heading(what, result)]
    for model, part in result["models"].items():
        tables.append(stats.table(_rows(model, part, its["per_rank_batch"])))
        tables.append(_verdict(part))
    return "\n\n".join(tables)


def _rows(model: str, part: Mapping[str, Any], per_rank_batch: int) -> list[tuple[str, ...]]:
    wall, cpu = part["seconds_per_step"], part["cpu_seconds_per_step"]
    rows: list[tuple[str, ...]] = [
        (model, "step (median)", "images/s", "CPU time", "hvdtrain's / this, 95 %", "efficiency, 95 %")
    ]
    plain, its_own = ALONE
    for name in wall:
        ranks = 1 if name in ALONE else part["ranks"]
        step_s = median(wall[name])
        against = part.get("against", {}).get(name)
        if name == plain:
            against = part["overhead"]
        efficiency = part.get("efficiency", {}).get(name)
        rows.append((
            name if name in ALONE else f"{name}, {ranks} ranks", stats.milliseconds(wall[name]),
            f"{ranks * per_rank_batch / step_s:,.1f}", stats.milliseconds(cpu[name]),
            str(stats.Interval(**against)) if against else "1" if name in ("hvdtrain", its_own) else "",
            str(stats.Interval(**efficiency)) if efficiency else "1" if name == LIMIT else "",
        ))  # fmt: skip
    return rows


def _verdict(part: Mapping[str, Any]) -> str:
    """Whether the targets are met, in words."""
    overhead = stats.Interval(**part["overhead"])
    lines = [stats.judged("one process, against plain PyTorch", overhead, TORCH_OVERHEAD_TARGET)]
    rivals = {name: stats.Interval(**part["against"][name]) for name in HAND_WRITTEN if name in part.get("against", {})}
    if rivals:
        name, ratio = max(rivals.items(), key=lambda item: item[1].value)
        lines.append(
            stats.judged(f"{part['ranks']} ranks, against the fastest hand-written loop ({name})", ratio, TORCH_TARGET)
        )
        efficiency = stats.Interval(**part["efficiency"]["hvdtrain"])
        reached = "reached" if efficiency.value >= EFFICIENCY_GOAL else "not reached"
        apart = f"efficiency, of {part['ranks']} processes that do not talk"
        lines.append(f"{apart}: {efficiency}, goal {EFFICIENCY_GOAL}: {reached}")
    return "\n".join(lines)
