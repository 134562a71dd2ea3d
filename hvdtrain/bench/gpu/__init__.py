"""`hvdtrain bench gpu`: is everything right on this machine's GPU, and what does it cost?

Each check is a program of its own: a plain reference without hvdtrain beside every engine, Keras and the pipeline; what
200 steps leave behind; ResNet-50 in bf16 against the bare loop, and against its input. One that fails or hangs stops no
other. Prints one table, writes one JSON file. With --device cpu --tiny every check is tried in a minute or two, and no
time is judged.

exit code: 0 all is right and every goal kept, 1 not
"""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hvdtrain.bench.gpu.plan import CHECKS, GpuCheck, command, environment
from hvdtrain.bench.gpu.process import CheckOutcome, outcome_of
from hvdtrain.bench.turns.report import begin, finish, heading, progress
from hvdtrain.core.flags import whole
from hvdtrain.record import stats

LEAST_S = 15.0  # what a check is begun with


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain bench gpu`."""
    add = parser.add_argument
    names = [check.name for check in CHECKS]
    add("--only", nargs="+", choices=names, metavar="CHECK", help=f"of {', '.join(names)} (default: all)")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="(default: %(default)s)")
    add("--tiny", action="store_true", help="small models, few steps: to see that every check runs; no time is judged")
    add("--seconds", type=whole(1), default=520, metavar="S", help="for all of it (default: %(default)s)")
    add("--jobs", type=whole(1), metavar="N", help="checks at once that time nothing (default: by cores, at most 4)")
    add("--dry-run", action="store_true", help="print what would run, and end")
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
            return CheckOutcome("left out", "no time was left", [], {}, 0.0)
        found = outcome_of(command(check, args), environment(), min(check.limit_s, left))
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
