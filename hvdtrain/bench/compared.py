"""`hvdtrain bench train --all`: one model trained in every way there is, in turns.

ResNet-50 of torchvision (and Keras' own) on random pictures, the same batch a rank; ways of one process with several
devices take the batch of all ranks. The processes of all ways do not fit into memory at once, so ways are measured in
groups, one after the other. Each group has its own process that trains alone and its own processes that do not talk to
each other, which is what this machine could do at most: every ratio is one of runs that took turns.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.bench import keras_job, torch_job
from hvdtrain.bench.turns.report import heading, progress
from hvdtrain.bench.turns.turns import MEMORY, ONE_THREAD, InterleavedJobs, Turns, launched, torch_command
from hvdtrain.cluster.hosts import probe
from hvdtrain.core.errors import ConfigError, install_command
from hvdtrain.record import stats

PROCESS_BYTES = 2 << 30  # about what one of ResNet-50 holds, with its framework
ALONE, APART = "one process", "processes that do not talk"
MANY_DEVICES = ("dataparallel", "pipeline")  # of one process
Groups = Sequence[Mapping[str, Sequence[float]]]  # seconds a step by way, round by round


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        label: in the table.
        arm: of the job.
        processes: that are started; 0 stands for all ranks.
        keras: the backend, where Keras trains.
    """

    label: str
    arm: str
    processes: int = 0
    keras: str = ""

    @property
    def family(self) -> str:
        return f"Keras on {self.keras}" if self.keras else "PyTorch"

    @property
    def alone(self) -> str:
        """The label of what its speed-up is over."""
        return f"{self.family}, {ALONE}"

    @property
    def apart(self) -> str:
        """The label of what its efficiency is against."""
        return f"{self.family}, {APART}"


WAYS = (
    Way(f"PyTorch, {ALONE}", "alone", 1),
    Way(f"PyTorch, {APART}", "alone"),
    Way("DataParallel (one process)", "dataparallel", 1),
    Way("pipeline (one process)", "pipeline", 1),
    Way("DistributedDataParallel", "ddp"),
    Way("DeepSpeed, ZeRO 0", "deepspeed"),
    Way("Accelerate", "accelerate"),
    Way("Lightning Fabric", "fabric"),
    Way("Horovod by hand", "horovod"),
    Way("hvdtrain on Horovod", "hvdtrain"),
    *(
        way
        for backend in ("tensorflow", "torch")
        for way in (
            Way(f"Keras on {backend}, {ALONE}", "plain", 1, backend),
            Way(f"Keras on {backend}, {APART}", "plain", 0, backend),
            Way(f"hvdtrain, Keras on {backend}", "prepared", 0, backend),
        )
    ),
)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every way, a group after the other; returns the part of the result that `report` reads.

    Raises:
        ConfigError: one rank, or several models.
    """
    if args.ranks < 2 or len(args.models) > 1:
        received = f"--ranks {args.ranks} --models {' '.join(args.models)}"
        raise ConfigError(
            "--all compares ways to train one model on several ranks", received, "--ranks 2 --models NAME"
        )
    ways = [way for way in WAYS if _is_wanted(way, args) and _is_there(way, args)]
    groups = grouped(ways, args.ranks, args.at_once or processes_that_fit())
    found = [_one_group(args, its, f"group {number} of {len(groups)}") for number, its in enumerate(groups, 1)]
    seconds, memory = ([its[kind] for its in found] for kind in ("wall", MEMORY))
    return {
        "ranks": args.ranks, "model": args.models[0], "groups": seconds,
        "memory_bytes": {way.label: max(sum((its.get(way.label, []) for its in memory), [])) for way in ways},
        "lines": {way.label: changed_lines(way) for way in ways},
        "ratios": {way.label: ratios(way, seconds, args.ranks) for way in ways},
    }  # fmt: skip


def _one_group(args: argparse.Namespace, group: Sequence[Way], name: str) -> dict[str, dict[str, list[float]]]:
    """Its ways in turns, see `InterleavedJobs.rounds`. Its processes are gone when it returns."""
    with InterleavedJobs(os.environ | ONE_THREAD) as jobs:
        for way in group:
            progress(f"{name}: starting {way.label}")
            devices = args.ranks if way.arm in MANY_DEVICES else 1
            ranks, threads = way.processes or args.ranks, {"OMP_NUM_THREADS": str(devices)}
            jobs.start(way.label, _command(args, way, ranks, devices), ranks, threads)
        turns: Turns = {way.label: (way.label, {"steps": args.steps, "arm": way.arm}) for way in group}
        jobs.rounds(turns, 1, f"{name}, warming up")  # Keras traces
        return jobs.rounds(turns, args.blocks, name)


def processes_that_fit() -> int:
    """How many processes of ResNet-50 the host's free memory holds."""
    return probe.memory().get("MemAvailable", 0) // PROCESS_BYTES


def grouped(ways: Sequence[Way], ranks: int, at_once: int) -> list[list[Way]]:
    """Ways that take turns with each other, each group with the references of its family; pure.

    Args:
        ways: in any order.
        ranks: processes of a way that uses all.
        at_once: the most processes of a group; one with a single way besides the references may have more.
    """
    groups = []
    for family in dict.fromkeys(way.family for way in ways):
        its = [way for way in ways if way.family == family]
        references = [way for way in its if way.label in (way.alone, way.apart)]
        group = list(references)
        for way in its:
            if way in references:
                continue
            if sum(one.processes or ranks for one in (*group, way)) > at_once and len(group) > len(references):
                groups.append(group)
                group = list(references)
            group.append(way)
        groups.append(group)
    return groups


def _is_wanted(way: Way, args: argparse.Namespace) -> bool:
    if not way.keras:
        return args.framework in (None, "torch")
    return args.framework in (None, "keras") and args.backend in (None, way.keras)


def _is_there(way: Way, args: argparse.Namespace) -> bool:
    needed = torch_job.NEEDS.get(way.arm) if not way.keras else "tensorflow" if way.keras == "tensorflow" else "keras"
    why = ""
    if needed and importlib.util.find_spec(needed) is None:
        why = f"{needed} is not installed ({install_command('dev')})"
    elif way.keras and args.models[0] not in keras_job.APPLICATIONS:
        why = f"Keras has no {args.models[0]}; of what both have: {', '.join(keras_job.APPLICATIONS)}"
    elif way.keras and args.device != "cpu":
        why = "Keras is measured on CPUs"
    if why:
        progress(f"left out: {way.label}: {why}")
    return not why


def _command(args: argparse.Namespace, way: Way, ranks: int, devices: int) -> list[str]:
    if way.keras:
        its = [f"--{name}={getattr(args, name.replace('-', '_'))}" for name in ("steps", "per-rank-batch", "pixels")]
        job = ["hvdtrain.bench.keras_job", f"--backend={way.keras}", f"--model={args.models[0]}", *its]
        return [*launched(ranks, "horovodrun"), sys.executable, "-m", *job]
    sizes = {name: getattr(args, name) for name in ("device", "per_rank_batch", "pixels")}
    return torch_command(way.arm, ranks, model=args.models[0], devices=devices, **sizes)


def ratios(way: Way, groups: Groups, ranks: int) -> dict[str, Any]:
    """Samples a second over those of one process ("speedup"), and over those of processes that do not talk
    ("efficiency"; not of one process). Pairs are of the same round of the same group."""
    if way.label == way.alone:
        return {"speedup": vars(stats.Interval(1.0, 1.0, 1.0))}
    alone, apart = (stats.ratio_of_medians(*_pairs(groups, its, way.label)) for its in (way.alone, way.apart))
    return {"speedup": {name: ranks * value for name, value in vars(alone).items()}, "efficiency": vars(apart)}


def _pairs(groups: Groups, above: str, below: str) -> tuple[list[float], list[float]]:
    both = [group for group in groups if above in group and below in group]
    return tuple([sample for group in both for sample in group[label]] for label in (above, below))  # type: ignore[return-value]


def changed_lines(way: Way) -> int:
    """Lines of the plain arm to change, take away or add for this one, of the jobs of this benchmark."""
    arms: Mapping[str, Any] = keras_job.ARMS if way.keras else torch_job.ARMS
    plain, its = (_lines(arms[arm]) for arm in ("plain" if way.keras else "alone", way.arm))
    steps = difflib.SequenceMatcher(None, plain, its, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in steps if kind != "equal")


def _lines(arm: Any) -> list[str]:
    """Those below its first line and docstring."""
    return [line for line in inspect.getsource(arm).splitlines()[2:] if line.strip()]


# ---- the report


NOTE = """\
speed-up: samples a second over those of one process of the same framework; efficiency: over those of processes that do
not talk; both in the same rounds of the same group. memory: the most that a device held; without GPUs, a process, also
one of several devices. changed lines: of the loop and what is before it, not of the input that processes share."""


def _what(result: Mapping[str, Any]) -> str:
    its, part = result["settings"], result["compared"]
    return (
        f"{part['model']}, batch {its['per_rank_batch']} a rank of {its['pixels']}x{its['pixels']}, {its['device']},"
        f" {part['ranks']} ranks or devices, a core each; {its['blocks']} rounds of {its['steps']} steps"
    )


def report(result: Mapping[str, Any]) -> str:
    """The table of a result."""
    part = result["compared"]
    rows: list[tuple[str, ...]] = [
        ("way", "groups", "step (median)", "speed-up, 95 %", "efficiency, 95 %", "memory", "changed lines")
    ]
    for name, ratio in part["ratios"].items():
        of = [number for number, group in enumerate(part["groups"], 1) if name in group]
        samples = [sample for number in of for sample in part["groups"][number - 1][name]]
        rows.append((
            name, ", ".join(map(str, of)), stats.milliseconds(samples),
            str(stats.Interval(**ratio["speedup"])) if "efficiency" in ratio else "1",
            str(stats.Interval(**ratio["efficiency"])) if "efficiency" in ratio else "",
            f"{part['memory_bytes'][name] / 2**20:.0f} MiB", str(part["lines"][name]),
        ))  # fmt: skip
    return f"{heading(_what(result), result)}\n\n{stats.table(rows)}\n\n{NOTE}"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Speed-up and memory of every way as bars; beside each what processes that do not talk reach.

    Raises:
        ConfigError: matplotlib is missing.
    """
    from hvdtrain.pipeline.tuning.plots import BLUE, DOTS_PER_INCH, SKY, VERMILION, new_figure

    part = result["compared"]
    names = list(part["ratios"])[::-1]
    speedups = [stats.Interval(**part["ratios"][name]["speedup"]) for name in names]
    figure = new_figure(11, 0.36 * len(names) + 1.4)
    speed, memory = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    errors = [[one.value - one.low for one in speedups], [one.high - one.value for one in speedups]]
    speed.barh(names, [one.value for one in speedups], xerr=errors, color=BLUE, height=0.65, error_kw={"linewidth": 1})
    for row, name in enumerate(names):
        if efficiency := part["ratios"][name].get("efficiency"):
            reached = speedups[row].value / efficiency["value"]  # by the processes apart of the same group
            speed.vlines(reached, row - 0.5, row + 0.5, color=VERMILION, linestyle=":", linewidth=1.5)
    speed.set_xlabel(f"speed-up over one process, {part['ranks']} ranks or devices\n(dotted: no communication)")
    memory.barh(names, [part["memory_bytes"][name] / 2**30 for name in names], color=SKY, height=0.65)
    memory.set_xlabel("memory a device, GiB" if result["settings"]["device"] == "cuda" else "memory a process, GiB")
    figure.suptitle(_what(result), fontsize="medium")
    figure.savefig(path, dpi=DOTS_PER_INCH)
