"""The tables of `hvdtrain bench comm`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from hvdtrain.bench.comm.ways import RULES
from hvdtrain.bench.turns.turns import heading
from hvdtrain.record import stats

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
