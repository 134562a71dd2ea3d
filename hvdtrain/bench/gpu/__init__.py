"""`hvdtrain bench gpu`: is everything right on this machine's GPU, and what does it cost?

Each check is a program of its own: a plain reference without hvdtrain beside every engine, Keras and the pipeline; what
200 steps leave behind; ResNet-50 in bf16 against the bare loop. One that fails or hangs stops no other. Prints one
table, writes one JSON file. With --device cpu --tiny every check is tried in a minute or two, and no time is judged.

exit code: 0 all is right and every goal kept, 1 not
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.bench.turns.turns import InterleavedJobs, begin, finish, heading, progress, shortened
from hvdtrain.core.errors import HvdtrainError
from hvdtrain.core.flags import whole
from hvdtrain.record import stats

LEAST_S = 15.0  # what a check is begun with


@dataclass(frozen=True)
class GpuCheck:
    """A program that checks one thing."""

    name: str
    what: str  # it checks, in a line
    job: str  # MODULE.FUNCTION of this folder
    engine: str = ""
    limit_s: int = 100  # until it is ended; the first programs find a cold file system
    ranks: int = 0  # started by `hvdtrain launch` or torchrun; 0: the program itself
    timed: bool = False  # runs alone on the machine
    shares: bool = False  # its ranks share a GPU, which NCCL does not allow: their sums go over Gloo


CHECKS = (
    GpuCheck("machine", "versions, the GPU, what Horovod was built with", "right.machine"),
    GpuCheck("solo", "one process against plain PyTorch", "right.engine", "solo"),
    GpuCheck("dataparallel", "one process that cuts its batches, on one device", "right.engine", "dataparallel"),
    GpuCheck("horovod", "Horovod, one rank (NCCL)", "right.engine", "horovod", ranks=1),
    GpuCheck(
        "horovod-shared", "Horovod, two ranks on one device (Gloo)", "right.engine", "horovod", ranks=2, shares=True
    ),
    GpuCheck("ddp", "torch.distributed, one rank (NCCL)", "right.engine", "ddp", ranks=1),
    GpuCheck("ddp-shared", "the same, two ranks on one device (Gloo)", "right.engine", "ddp", ranks=2, shares=True),
    GpuCheck("deepspeed", "DeepSpeed, if it is there, one rank", "right.engine", "deepspeed", ranks=1),
    GpuCheck("keras", "Keras on PyTorch against plain Keras, one process", "right.keras_fit"),
    GpuCheck("keras-horovod", "Keras on PyTorch over Horovod, one rank (NCCL)", "right.keras_fit", ranks=1),
    GpuCheck("keras-shared", "the same, two ranks on one device (Gloo)", "right.keras_fit", ranks=2, shares=True),
    GpuCheck("resources", "memory, threads, files and streams over 200 steps", "cost.resources"),
    GpuCheck("pipeline", "two stages on one device against the unsplit model", "cost.stages"),
    GpuCheck("speed", "ResNet-50, bf16: images/s, and against the bare loop", "cost.speed", "solo", 120, timed=True),
    GpuCheck("speed-horovod", "the same over Horovod, one rank (NCCL)", "cost.speed", "horovod", 120, 1, timed=True),
)


def command(check: GpuCheck, args: argparse.Namespace) -> list[str]:
    """The check's command line."""
    program = [sys.executable, "-m", "hvdtrain.bench.gpu.check", check.job, *filter(None, [check.engine])]
    program += [f"--device={args.device}"] + ["--tiny"] * args.tiny + ["--shared"] * check.shares
    if not check.ranks:
        return program
    if check.engine in ("ddp", "deepspeed"):  # which need no Horovod
        ranks = ["--standalone", f"--nproc-per-node={check.ranks}", "--no-python"]
        return [sys.executable, "-m", "torch.distributed.run", *ranks, *program]
    hosts = ["-np", str(check.ranks), "-H", f"localhost:{check.ranks}", "--no-checks", "--quiet"]
    return [sys.executable, "-m", "hvdtrain", "launch", *hosts, "--", *program]


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of a check."""

    result: str  # ok, MISSED (a goal), FAILED (by itself, or ended), "not here" (what it needs), "skipped" (for time)
    reason: str  # why not ok, in a line
    seconds: float  # that it took
    goals: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    output: str = ""  # its last lines, if it failed


def outcome_of(command: Sequence[str], ranks: int, limit_s: float) -> CheckOutcome:
    """Runs a check's command to its end, or ends it with all that it started."""
    started = time.monotonic()
    with InterleavedJobs(os.environ | {"KERAS_BACKEND": "torch", "PYTHONUNBUFFERED": "1"}) as jobs:
        jobs.ready_s = limit_s
        try:
            jobs.start("check", command, ranks)
            found = jobs.turn("check")[0]
        except HvdtrainError as error:
            return CheckOutcome("FAILED", shortened(error), time.monotonic() - started, output=error.received)
    seconds = time.monotonic() - started
    if "not here" in found:
        return CheckOutcome("not here", found["not here"], seconds)
    missed = [goal for goal in found["goals"] if not goal["kept"]]
    reason = "; ".join(f"{goal['what']} {goal['value']:.4g} is above {goal['limit']:g}" for goal in missed)
    return CheckOutcome("MISSED" if missed else "ok", reason, seconds, **found)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain bench gpu`."""
    add = parser.add_argument
    names = [check.name for check in CHECKS]
    add("--only", nargs="+", choices=names, metavar="CHECK", help=f"of {', '.join(names)} (default: all)")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="(default: %(default)s)")
    add("--tiny", action="store_true", help="small models and few steps: shows that every check runs; judges no time")
    add("--seconds", type=whole(1), default=520, metavar="S", help="seconds for all checks (default: %(default)s)")
    add(
        "--jobs",
        type=whole(1),
        metavar="N",
        help="parallel checks, among those that time nothing (default: by cores, at most 4)",
    )
    add("--dry-run", action="store_true", help="print what would run, and exit")
    add("--out", type=Path, default=Path("bench-gpu.json"), metavar="FILE", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Runs the checks; returns the exit code."""
    chosen = [check for check in CHECKS if not args.only or check.name in args.only]
    if args.dry_run:
        for check in chosen:
            print(f"{check.name} (at most {check.limit_s} s): {check.what}\n    {shlex.join(command(check, args))}")
        return 0
    result = begin("gpu", args, "this benchmark starts its own ranks")
    deadline = time.monotonic() + args.seconds
    jobs = args.jobs or max(1, min(4, len(os.sched_getaffinity(0)) // 2))

    def done(check: GpuCheck) -> CheckOutcome:
        left = deadline - time.monotonic()
        if left < LEAST_S:
            return CheckOutcome("skipped", "no time was left", 0.0)
        found = outcome_of(command(check, args), max(1, check.ranks), min(check.limit_s, left))
        progress(f"{check.name}: {found.result} ({found.seconds:.0f} s) {found.reason}".rstrip())
        return found

    with ThreadPoolExecutor(jobs) as pool:
        together = {check.name: pool.submit(done, check) for check in chosen if not check.timed}
        outcomes = {name: its.result() for name, its in together.items()}
    outcomes |= {check.name: done(check) for check in chosen if check.timed}  # those have the machine for themselves
    result["checks"] = {check.name: vars(outcomes[check.name]) | {"what": check.what} for check in chosen}
    finish(args, result, report)
    return 0 if all(its.result in ("ok", "not here") for its in outcomes.values()) else 1


def report(result: Mapping[str, Any]) -> str:
    """The table of a result."""
    rows: list[tuple[str, ...]] = [("check", "result", "seconds", "found")]
    for name, its in result["checks"].items():
        found = its["reason"] or "; ".join(
            f"{goal['what']} {goal['value']:.4g}" + (f" (<= {goal['limit']:g})" if goal["limit"] is not None else "")
            for goal in its["goals"]
        )
        rows.append((name, its["result"], f"{its['seconds']:.0f}", found))
    figures = [
        f"{name}: {', '.join(f'{key} {value}' for key, value in its['figures'].items() if key != 'samples_s')}"
        for name, its in result["checks"].items()
        if its["figures"]
    ]
    return "\n\n".join([heading("", result), stats.table(rows), "\n".join(figures)])
