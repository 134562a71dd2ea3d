"""How long it takes to sum an array over ranks: by Horovod, by MPI's own all-reduce, by a ring, by parameter servers.

Ring and servers are written with mpi4py's messages, so that the bytes of every link are counted.

Prints tables, and writes a JSON file with every sample. Give the machine nothing else to do.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from hvdtrain.bench.comm.ways import RULES, WAYS
from hvdtrain.bench.turns.turns import ONE_THREAD, InterleavedJobs, begin, finish, heading, launched, progress
from hvdtrain.core.errors import ConfigError, install_command
from hvdtrain.core.flags import whole
from hvdtrain.record import stats
from hvdtrain.record.stats import rotated
from hvdtrain.world.startup import find_modules

TABLED = 4  # a factor between the sizes of a table: all are in the file


def report(result: Mapping[str, Any]) -> str:
    """The tables of a result."""
    where = "all ranks on this machine"
    most, cores = max(map(int, result["ranks"])), result["machine"]["cores_usable"]
    if most > cores:
        where += f"; {most} ranks share {cores} cores: small sums wait for one, whatever their size"
    tables = [heading(where, result)]
    for ranks, part in result["ranks"].items():
        size = max(next(iter(part["seconds"].values())))
        wrong = [f"NOT numpy's sum: {way}, {readable(size)}" for way, size in part["inexact"]]
        exact = "\n".join(wrong or ["every sum is numpy's"])
        tables += [_seconds(ranks, part), _bandwidths(int(ranks), part, size), exact, _slow(part)]
    tables.append("the ranks share this machine's memory and cores: this is not what a network does")
    return "\n\n".join(tables)


def _medians(part: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    return {way: {size: median(its) for size, its in sizes.items()} for way, sizes in part["seconds"].items()}


def _seconds(ranks: str, part: Mapping[str, Any]) -> str:
    ways = _medians(part)
    rows = [(f"{ranks} ranks: a sum of", *ways)]
    sizes = sorted(next(iter(ways.values())))
    for size in sizes:
        if math.log(size / sizes[0], TABLED) % 1 < 1e-9:
            rows.append((readable(size), *(f"{its[size] * 1e3:.3f} ms" for its in ways.values())))
    return stats.table(rows)


def _bandwidths(ranks: int, part: Mapping[str, Any], size: int) -> str:
    """Returns the table of bandwidths as in nccl-tests: algorithm is size over time, bus is that times 2 (N-1)/N."""
    columns = ("algorithm", "bus", "busiest link, one way", "both ways", "rule")
    rows = [(f"of {readable(size)}", *columns)]
    for way, sizes in _medians(part).items():
        rate = size / sizes[size] / 1e9
        counted = part["links"][way][size]
        rule = RULES[way](ranks) if way in RULES else None
        rows.append((
            way, f"{rate:.2f} GB/s", f"{rate * 2 * (ranks - 1) / ranks:.2f} GB/s",
            f"{counted['one way']:.4g} x" if rule else "", f"{counted['both ways']:.4g} x" if rule else "",
            f"{rule:.4g} x" if rule else "",
        ))  # fmt: skip
    return stats.table(rows)


def _slow(part: Mapping[str, Any]) -> str:
    cases = list(next(iter(part["slow"].values())))
    rows = [("one slow rank, 4 MiB", *cases)]
    rows += [(way, *(f"{its[case] * 1e3:.1f} ms" for case in cases)) for way, its in part["slow"].items()]
    return stats.table(rows)


def readable(size: float) -> str:
    """Bytes in words."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


BLOCK_S, MOST_REPEATS = 0.1, 200
SLOW_BYTES, LATE_S = 4 << 20, 0.05
# who starts the ranks, and the ways that they have there
JOBS = {"mpirun": ("horovod", *WAYS), "horovodrun": ("horovod",)}
# seconds of each round, by way, by size in bytes
Samples = dict[str, dict[int, list[float]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain bench comm`."""
    count = whole(1)
    add = parser.add_argument
    add("-np", "--ranks", type=whole(2), nargs="+", default=[2, 4], metavar="N", help="numbers of ranks (default: 2 4)")
    add("--launchers", nargs="+", choices=list(JOBS), default=list(JOBS), help="Open MPI, Gloo (default: both)")
    add("--smallest", type=count, default=1, metavar="KIB", help="size of the smallest array (default: %(default)s)")
    add(
        "--largest",
        type=count,
        default=256,
        metavar="MIB",
        help="size of the largest array; each is twice the previous one (default: 256)",
    )
    add("--rounds", type=count, default=5, metavar="N", help="rounds of all sizes and ways (default: %(default)s)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="device of Horovod's arrays (default: %(default)s)")
    add("--out", type=Path, default=Path("bench-comm.json"), metavar="FILE", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; returns 0."""
    if args.smallest > args.largest << 10:
        received = f"--smallest {args.smallest} (KiB) --largest {args.largest} (MiB)"
        raise ConfigError("the smallest array must not be larger than the largest", received, "--smallest 1")
    args.launchers, args.ranks = list(dict.fromkeys(args.launchers)), list(dict.fromkeys(args.ranks))
    mpi = {"mpi4py": install_command("mpi")} if "mpirun" in args.launchers else {}
    find_modules({"torch": install_command("torch")} | mpi)
    result = begin("comm", args, "a benchmark starts its own ranks")
    result["ranks"] = {}
    for ranks in args.ranks:
        result["ranks"][str(ranks)] = measure(args, ranks)
    return finish(args, result, report)


def measure(args: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Measures everything about one number of ranks."""
    sizes = [args.smallest << 10 << power for power in range(32) if args.smallest << power <= args.largest << 10]
    with jobs_of(args, ranks) as jobs:
        ways = {f"{way}, {launcher}" if way == "horovod" else way: (launcher, way)
                for launcher in args.launchers for way in JOBS[launcher]}  # fmt: skip
        seconds: Samples = {name: {size: [] for size in sizes} for name in ways}
        found: dict[str, Any] = {"links": {}, "inexact": []}
        for turn in range(args.rounds):
            progress(f"{ranks} ranks: round {turn + 1} of {args.rounds}")
            for size in sizes:
                for name in rotated(ways, turn):
                    answers = _turn(jobs, *ways[name], size, seconds[name][size])
                    if not all(answer["exact"] for answer in answers):
                        found["inexact"].append([name, size])
                    found["links"].setdefault(name, {})[size] = _links(answers, size)
        found["seconds"] = seconds
        found["slow"] = slow_ranks(args, jobs, ways, ranks)
    return found


@contextmanager
def jobs_of(args: argparse.Namespace, ranks: int) -> Iterator[InterleavedJobs]:
    """Starts a job of ranks for each launcher, ready for orders."""
    command = [sys.executable, "-m", "hvdtrain.bench.comm.job", f"--device={args.device}"]
    with InterleavedJobs(os.environ | ONE_THREAD) as jobs:
        for launcher in args.launchers:
            progress(f"{ranks} ranks: starting them by {launcher}")
            jobs.start(launcher, [*launched(ranks, launcher), *command], ranks)
        yield jobs


def _turn(jobs: InterleavedJobs, job: str, way: str, size: int, samples: list[float]) -> list[Any]:
    """Runs one block of sums; appends its seconds, those of the slowest rank, to `samples`."""
    repeat = max(1, min(MOST_REPEATS, int(BLOCK_S / samples[-1]))) if samples else 2
    answers = jobs.turn(job, way=way, bytes=size, repeat=repeat)
    samples.append(max(answer["wall"] for answer in answers))
    return answers


def _links(answers: Sequence[Mapping[str, Any]], size: int) -> dict[str, float]:
    """Returns bytes that the busiest rank's link carried in a sum, one way and both, as multiples of the array's."""
    sent = [sum(answer["sent"].values()) for answer in answers]
    received = [sum(answer["sent"].get(rank, 0) for answer in answers) for rank in range(len(answers))]
    both = max(out + back for out, back in zip(sent, received, strict=True))
    return {"one way": max([*sent, *received]) / size, "both ways": both / size}


def slow_ranks(
    args: argparse.Namespace, jobs: InterleavedJobs, ways: Mapping[str, tuple[str, str]], ranks: int
) -> dict[str, dict[str, float]]:
    """Returns seconds of a sum as usual, and when the last rank comes late to each."""
    found: dict[str, dict[str, float]] = {name: {} for name in ways}
    for what, late_s in (("usual", {}), (f"{LATE_S * 1e3:.0f} ms late", {ranks - 1: LATE_S})):
        for name, (job, way) in ways.items():
            turns = [jobs.turn(job, way=way, bytes=SLOW_BYTES, repeat=2, late_s=late_s) for _ in range(args.rounds)]
            found[name][what] = median(max(answer["wall"] for answer in answers) for answers in turns)
    return found
