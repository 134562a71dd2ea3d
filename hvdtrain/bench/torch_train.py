"""`hvdtrain bench train --framework torch`: a step of hvdtrain's loop against the same loop on the alternatives.

All arms are jobs of one process tree that take turns (see `turns`): plain PyTorch and hvdtrain in one process; hvdtrain
on Horovod, hand-written Horovod, DistributedDataParallel, Accelerate and Lightning Fabric on several ranks; and as many
processes of hvdtrain that do not talk, which is the limit: efficiency is their time over an arm's. One thread and one
core a rank on CPU. Ratios are medians over rounds, each round a pair.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Mapping
from statistics import median
from typing import Any

from hvdtrain.bench.torch_job import NEEDS
from hvdtrain.bench.turns.report import measured_on, progress, versions
from hvdtrain.bench.turns.turns import ONE_THREAD, InterleavedJobs, torch_command
from hvdtrain.core.errors import install_command
from hvdtrain.record import stats

# what is run on several ranks, hvdtrain first
PEERS = ("hvdtrain", "horovod", "ddp", "accelerate", "fabric")
# hand-written loops: the fastest of them is the measure
HAND_WRITTEN = ("horovod", "ddp")
TARGET, EFFICIENCY_GOAL, OVERHEAD_TARGET = 1.00, 0.92, 1.01
ALONE = {"plain PyTorch, 1 process": "alone", "hvdtrain, 1 process": "hvdtrain"}
LIMIT = "no communication"


def add_arguments(add: Any, count: Any) -> None:
    """The flags that only PyTorch's part has."""
    add(
        "--models", nargs="+", metavar="NAME", help="torch: torchvision's (default: resnet18 resnet50; --all: resnet50)"
    )
    add("--pixels", type=count, default=64, metavar="N", help="torch: side of a picture (default: %(default)s)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="torch: (default: %(default)s)")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every model in turn; returns the part of the result that `report` reads."""
    return {model: _one_model(args, model) for model in args.models}


def _one_model(args: argparse.Namespace, model: str) -> dict[str, Any]:
    peers = [peer for peer in PEERS if peer not in NEEDS or importlib.util.find_spec(NEEDS[peer])] * (args.ranks > 1)
    for peer in set(PEERS) - set(peers) if args.ranks > 1 else ():
        progress(f"left out, not installed: {peer} ({install_command('dev')})")
    arms = {label: (arm, 1) for label, arm in ALONE.items()} | {peer: (peer, args.ranks) for peer in peers}
    if args.ranks > 1:
        arms[LIMIT] = ("apart", args.ranks)
    its = {name: getattr(args, name) for name in ("device", "per_rank_batch", "pixels")}
    with InterleavedJobs(os.environ | ONE_THREAD) as jobs:
        for name, (arm, ranks) in arms.items():
            progress(f"{model}: starting {name}")
            jobs.start(name, torch_command(arm, ranks, model=model, **its), ranks)
        seconds = jobs.rounds({name: (name, {"steps": args.steps}) for name in arms}, args.blocks, model)
    return {"ranks": args.ranks, "seconds_per_step": seconds["wall"], "cpu_seconds_per_step": seconds["cpu"]} | _ratios(
        seconds["wall"]
    )


def _ratios(wall: Mapping[str, list[float]]) -> dict[str, Any]:
    """hvdtrain's step against each arm's, and what the ranks bring."""

    def ratio(above: str, below: str) -> dict[str, float]:
        return vars(stats.ratio_of_medians(wall[above], wall[below]))

    plain, alone = ALONE
    found: dict[str, Any] = {"overhead": ratio(alone, plain)}
    if peers := [name for name in wall if name in PEERS]:
        found["against"] = {peer: ratio("hvdtrain", peer) for peer in peers if peer != "hvdtrain"}
        found["efficiency"] = {peer: ratio(LIMIT, peer) for peer in peers}
    return found


# ---- the report


def report(result: Mapping[str, Any]) -> str:
    """The tables of a result."""
    its = result["settings"]
    heading = (
        f"batch {its['per_rank_batch']} a rank, {its['pixels']}x{its['pixels']} pixels, {its['device']},"
        f" one thread and one core a rank; {its['blocks']} rounds of {its['steps']} steps"
    )
    tables = [f"{heading}\n{measured_on(result)}\n{versions(result)}"]
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
    lines = [stats.judged("one process, against plain PyTorch", stats.Interval(**part["overhead"]), OVERHEAD_TARGET)]
    rivals = {name: stats.Interval(**part["against"][name]) for name in HAND_WRITTEN if name in part.get("against", {})}
    if rivals:
        name, ratio = max(rivals.items(), key=lambda item: item[1].value)
        lines.append(
            stats.judged(f"{part['ranks']} ranks, against the fastest hand-written loop ({name})", ratio, TARGET)
        )
        efficiency = stats.Interval(**part["efficiency"]["hvdtrain"])
        reached = "reached" if efficiency.value >= EFFICIENCY_GOAL else "not reached"
        apart = f"efficiency, of {part['ranks']} processes that do not talk"
        lines.append(f"{apart}: {efficiency}, goal {EFFICIENCY_GOAL}: {reached}")
    return "\n".join(lines)
