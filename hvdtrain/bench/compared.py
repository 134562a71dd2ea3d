"""`hvdtrain bench train --all`: one model trained in every way there is, in turns.

ResNet-50 of torchvision (and Keras' own) on random pictures, the same batch a rank; ways of one process with several
devices take the batch of all ranks. Speed-up is samples a second over those of one process; efficiency compares with as
many processes that do not talk to each other, which is what this machine could do at most.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hvdtrain.bench import torch_job
from hvdtrain.bench.report import measured_on, progress, versions
from hvdtrain.bench.turns import InterleavedJobs, launched
from hvdtrain.core import stats
from hvdtrain.core.errors import install_command

MODEL = "resnet50"
THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        label: in the table.
        arm: of the job.
        processes: that are started; 0 stands for all ranks.
        keras: the backend, where Keras trains.
        base: the way of one process that it is compared with.
    """

    label: str
    arm: str
    processes: int = 0
    keras: str = ""
    base: str = "PyTorch, one process"


WAYS = (
    Way("PyTorch, one process", "alone", 1),
    Way("processes that do not talk", "alone"),
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
            Way(f"Keras on {backend}, one process", "plain", 1, backend, f"Keras on {backend}, one process"),
            Way(f"hvdtrain, Keras on {backend}", "prepared", 0, backend, f"Keras on {backend}, one process"),
        )
    ),
)
APART = "processes that do not talk"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every way in turns; returns the part of the result that `report` reads."""
    ways = [way for way in WAYS if _is_there(way)]
    seconds: dict[str, list[float]] = {way.label: [] for way in ways}
    memory: dict[str, float] = {}
    with InterleavedJobs(os.environ | THREADS) as jobs:
        for way in ways:
            progress(f"starting {way.label}")
            ranks = way.processes or args.ranks
            jobs.start(way.label, [*launched(ranks, _launcher(way)), *_command(args, way)], ranks)
        for turn in range(args.blocks + 1):  # the first warms up: Keras traces
            progress(f"round {turn} of {args.blocks}" if turn else "warming up")
            for way in stats.rotated(ways, turn):
                answers = jobs.turn(way.label, steps=args.steps, arm=way.arm)
                memory[way.label] = max(answer["memory"] for answer in answers)
                if turn:
                    seconds[way.label].append(max(answer["wall"] for answer in answers))
    return {
        "ranks": args.ranks, "seconds_per_step": seconds, "memory_bytes": memory,
        "lines": {way.label: changed_lines(way) for way in ways if not way.keras},
        "speedup": {way.label: vars(_speedup(way, seconds, args.ranks)) for way in ways},
    }  # fmt: skip


def _is_there(way: Way) -> bool:
    needed = torch_job.NEEDS.get(way.arm) if not way.keras else "tensorflow" if way.keras == "tensorflow" else "keras"
    there = not needed or importlib.util.find_spec(needed) is not None
    if not there:
        progress(f"left out, {needed} is not installed: {way.label} ({install_command('dev')})")
    return there


def _launcher(way: Way) -> str:
    return "horovodrun" if way.keras else torch_job.LAUNCHED_BY.get(way.arm, "")


def _command(args: argparse.Namespace, way: Way) -> list[str]:
    devices = args.ranks if way.arm in ("dataparallel", "pipeline") else 1
    sizes = [f"--per-rank-batch={args.per_rank_batch * devices}", f"--pixels={args.pixels}"]
    if way.keras:
        job = ["hvdtrain.bench.keras_job", f"--backend={way.keras}", f"--steps={args.steps}", *sizes]
    else:
        job = ["hvdtrain.bench.torch_job", way.arm, *sizes, f"--device={args.device}", f"--devices={devices}"]
    return ["env", f"OMP_NUM_THREADS={devices}", sys.executable, "-m", *job, f"--model={MODEL}"]


def _speedup(way: Way, seconds: Mapping[str, list[float]], ranks: int) -> stats.Interval:
    """Samples a second over those of one process."""
    its = stats.ratio_of_medians(seconds[way.base], seconds[way.label])
    factor = 1 if way.processes == 1 and way.arm not in ("dataparallel", "pipeline") else ranks
    return stats.Interval(*(factor * value for value in (its.value, its.low, its.high)))


def changed_lines(way: Way) -> int:
    """Lines of the plain arm that this one takes away or adds, of the jobs of this benchmark."""
    plain, its = (_lines(torch_job.ARMS[arm]) for arm in ("alone", way.arm))
    return sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in difflib.unified_diff(plain, its, n=0))


def _lines(arm: Any) -> list[str]:
    return [line for line in inspect.getsource(arm).splitlines()[2:] if line.strip()]


# ---- the report


def report(result: Mapping[str, Any]) -> str:
    """The table of a result."""
    its, part = result["settings"], result["compared"]
    ranks, apart = part["ranks"], part["speedup"].get(APART, {}).get("value")
    heading = (
        f"{MODEL}, batch {its['per_rank_batch']} a rank of {its['pixels']}x{its['pixels']}, {its['device']},"
        f" {ranks} ranks or devices, a core each; {its['blocks']} rounds of {its['steps']} steps"
    )
    rows: list[tuple[str, ...]] = [
        ("way", "step (median)", "speed-up, 95 %", "efficiency", "memory a process", "changed lines")
    ]
    for name, samples in part["seconds_per_step"].items():
        speedup = stats.Interval(**part["speedup"][name])
        lines = part["lines"].get(name)
        rows.append((
            name, f"{median(samples) * 1e3:.0f} ms", str(speedup), f"{speedup.value / apart:.2f}" if apart else "",
            f"{part['memory_bytes'][name] / 2**20:.0f} MiB", "" if lines is None else str(lines),
        ))  # fmt: skip
    note = "efficiency: speed-up over that of processes that do not talk; Keras' ways: against Keras in one process"
    return f"{heading}\n{measured_on(result)}\n{versions(result)}\n\n{stats.table(rows)}\n{note}"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Speed-ups as bars, with what processes that do not talk reach as a line.

    Raises:
        ConfigError: matplotlib is missing.
    """
    from hvdtrain.pipeline.tuning.plots import BLUE, DOTS_PER_INCH, VERMILION, new_figure

    speedups = {name: stats.Interval(**its) for name, its in result["compared"]["speedup"].items()}
    figure = new_figure(8, 0.42 * len(speedups) + 1.2)
    axes = figure.subplots()
    names = list(speedups)[::-1]
    its = [speedups[name] for name in names]
    values = [one.value for one in its]
    errors = [[one.value - one.low for one in its], [one.high - one.value for one in its]]
    axes.barh(names, values, xerr=errors, color=BLUE, height=0.65, error_kw={"linewidth": 1})
    if APART in speedups:
        axes.axvline(speedups[APART].value, color=VERMILION, linestyle=":", linewidth=1.5)
    axes.set_xlabel(
        f"speed-up over one process, {result['compared']['ranks']} ranks or devices; dotted: no communication"
    )
    figure.savefig(path, dpi=DOTS_PER_INCH)
