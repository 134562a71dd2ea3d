"""``hvdtrain bench train --framework torch``: a step of hvdtrain's loop against the same loop on the alternatives.

All arms are jobs of one process tree that take turns (see `turns`): plain PyTorch and hvdtrain in one process; hvdtrain
on Horovod, hand-written Horovod, DistributedDataParallel, Accelerate and Lightning Fabric on several ranks. One thread
and one core a rank on CPU. Ratios are medians over rounds, each round a pair.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.bench.torch_job import LAUNCHED_BY, NEEDS
from hvdtrain.bench.turns import Turns
from hvdtrain.core import stats
from hvdtrain.core.errors import LauncherError, build_horovod_command, install_command

# what is run on several ranks, hvdtrain first
PEERS = ("hvdtrain", "horovod", "ddp", "accelerate", "fabric")
# hand-written loops: the fastest of them is the measure
HAND_WRITTEN = ("horovod", "ddp")
TELLING_WIDTH = 0.10  # an interval wider than that says nothing about a few percent
TARGET, EFFICIENCY_GOAL, OVERHEAD_TARGET = 1.00, 0.95, 1.01
ALONE = {"plain PyTorch, 1 process": "alone", "hvdtrain, 1 process": "hvdtrain"}
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

Seconds = dict[str, dict[str, list[float]]]


def add_arguments(add: Any, count: Any) -> None:
    """The flags that only PyTorch's part has."""
    add("--models", nargs="+", default=["resnet18", "resnet50"], metavar="NAME",
        help="torch: torchvision's (default: resnet18 resnet50)")  # fmt: skip
    add("--pixels", type=count, default=64, metavar="N", help="torch: side of a picture (default: %(default)s)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="torch: (default: %(default)s)")


def measure(args: argparse.Namespace, tell: Any) -> dict[str, Any]:
    """Every model in turn; returns the part of the result that `report` reads."""
    return {model: _one_model(args, model, tell) for model in args.models}


def _one_model(args: argparse.Namespace, model: str, tell: Any) -> dict[str, Any]:
    peers = [peer for peer in PEERS if peer not in NEEDS or importlib.util.find_spec(NEEDS[peer])] * (args.ranks > 1)
    for peer in set(PEERS) - set(peers) if args.ranks > 1 else ():
        tell(f"left out, not installed: {peer} ({install_command('dev')})")
    arms = {label: (arm, 1) for label, arm in ALONE.items()} | {peer: (peer, args.ranks) for peer in peers}
    seconds: Seconds = {clock: {name: [] for name in arms} for clock in ("wall", "cpu")}
    with Turns(os.environ | THREADS) as turns:
        for name, (arm, ranks) in arms.items():
            tell(f"{model}: starting {name}")
            turns.start(name, _command(args, model, arm, ranks), ranks)
        for block in range(args.blocks):
            tell(f"{model}: round {block + 1} of {args.blocks}")
            names = list(arms)[block % len(arms) :] + list(arms)[: block % len(arms)]  # another begins each time
            for name in names:
                answers = turns.turn(name, steps=args.steps)
                for clock, per_arm in seconds.items():
                    per_arm[name].append(max(answer[clock] for answer in answers))
    return {"ranks": args.ranks, "seconds_per_step": seconds["wall"], "cpu_seconds_per_step": seconds["cpu"]} | _ratios(
        seconds["wall"]
    )


def _ratios(wall: Mapping[str, list[float]]) -> dict[str, Any]:
    """hvdtrain's step against each arm's, and what the ranks bring."""
    plain, alone = ALONE
    found: dict[str, Any] = {"overhead": vars(stats.ratio_of_medians(wall[alone], wall[plain], paired=True))}
    if "hvdtrain" in wall:
        found["against"] = {
            peer: vars(stats.ratio_of_medians(wall["hvdtrain"], wall[peer], paired=True))
            for peer in wall
            if peer not in ALONE and peer != "hvdtrain"
        }
        found["efficiency"] = {
            peer: vars(stats.ratio_of_medians(wall[alone], wall[peer], paired=True))
            for peer in wall
            if peer not in ALONE
        }
    return found


def _command(args: argparse.Namespace, model: str, arm: str, ranks: int) -> list[str]:
    job = [
        "-m", "hvdtrain.bench.torch_job", arm, f"--model={model}", f"--device={args.device}",
        f"--per-rank-batch={args.per_rank_batch}", f"--pixels={args.pixels}",
    ]  # fmt: skip
    launcher = LAUNCHED_BY.get(arm) if ranks > 1 else None
    if launcher is None:
        return [sys.executable, *job]
    beside = Path(sys.executable).parent / launcher
    found = str(beside) if beside.exists() else shutil.which(launcher)
    if found is None:
        remedy = build_horovod_command() if launcher == "horovodrun" else install_command("torch")
        raise LauncherError(f"{ranks} ranks are started by {launcher}", "not found on PATH", remedy)
    if launcher == "torchrun":
        return [found, "--standalone", f"--nproc-per-node={ranks}", *job]
    return [found, "--gloo", "-np", str(ranks), "-H", f"localhost:{ranks}", sys.executable, *job]


# ---- the report


def report(result: Mapping[str, Any]) -> str:
    """The tables of a result."""
    tables = [_heading(result)]
    for model, part in result["models"].items():
        tables.append(stats.table(_rows(model, part, result["settings"]["per_rank_batch"])))
        tables.append(_verdict(part))
    return "\n\n".join(tables)


def _rows(model: str, part: Mapping[str, Any], per_rank_batch: int) -> list[tuple[str, ...]]:
    wall, cpu = part["seconds_per_step"], part["cpu_seconds_per_step"]
    rows: list[tuple[str, ...]] = [
        (model, "step (median)", "images/s", "CPU time", "hvdtrain's / this, 95 %", "efficiency, 95 %")
    ]
    for name in wall:
        ranks = 1 if name in ALONE else part["ranks"]
        step_s = stats.median(wall[name])
        against = part.get("against", {}).get(name)
        if name == next(iter(ALONE)):
            against = part["overhead"]
        efficiency = part.get("efficiency", {}).get(name)
        rows.append((
            name if name in ALONE else f"{name}, {ranks} ranks", stats.milliseconds(wall[name]),
            f"{ranks * per_rank_batch / step_s:,.1f}", stats.milliseconds(cpu[name]),
            str(stats.Ratio(**against)) if against else "1", str(stats.Ratio(**efficiency)) if efficiency else "",
        ))  # fmt: skip
    return rows


def _verdict(part: Mapping[str, Any]) -> str:
    """Whether the targets are met, in words."""
    lines = [_kept("one process, against plain PyTorch", stats.Ratio(**part["overhead"]), OVERHEAD_TARGET)]
    rivals = {name: stats.Ratio(**part["against"][name]) for name in HAND_WRITTEN if name in part.get("against", {})}
    if rivals:
        name, ratio = max(rivals.items(), key=lambda item: item[1].value)
        lines.append(_kept(f"{part['ranks']} ranks, against the fastest hand-written loop ({name})", ratio, TARGET))
        efficiency = stats.Ratio(**part["efficiency"]["hvdtrain"])
        reached = "reached" if efficiency.high >= EFFICIENCY_GOAL else "not reached"
        lines.append(f"scaling efficiency 1 to {part['ranks']}: {efficiency}, goal {EFFICIENCY_GOAL}: {reached}")
    return "\n".join(lines)


def _kept(what: str, ratio: stats.Ratio, target: float) -> str:
    """A target is kept if the median is within it, or a narrow interval shows no difference from it."""
    if ratio.high - ratio.low > TELLING_WIDTH and ratio.low <= target <= ratio.high:
        word = "too noisy to tell: give the machine nothing else to do, and more --blocks"
    else:
        word = "kept" if ratio.value <= target else "kept within the noise" if ratio.low <= target else "MISSED"
    return f"{what}: {ratio}, target <= {target:.2f}: {word}"


def _heading(result: Mapping[str, Any]) -> str:
    machine, settings = result["machine"], result["settings"]
    known = " ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"batch {settings['per_rank_batch']} a rank, {settings['pixels']}x{settings['pixels']} pixels,"
        f" {settings['device']}, one thread and one core a rank; {settings['blocks']} rounds of"
        f" {settings['steps']} steps\n"
        f"{machine['processor']}, {machine['cores_usable']} cores, load {machine['load_1min']} before,"
        f" {result['load_after']} after\n{known}"
    )
