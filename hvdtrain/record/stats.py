"""Intervals, turns and tables for the numbers of benchmarks and of tuning."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.core.version import __version__

RESAMPLES = 4000
Name = TypeVar("Name")


@dataclass(frozen=True)
class Interval:
    """An estimate, and where it lies with the wanted confidence; infinite from one sample."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.high > 100 * self.value:
            return f"{self.value:.3f} (too few rounds for an interval)"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio_of_medians(above: Sequence[float], below: Sequence[float], confidence: float = 0.95) -> Interval:
    """The median of the ratios of pairs, and the interval that a bootstrap gives it (Efron 1979, percentiles).

    A sample that something else on the machine spoilt does not move it, nor does a machine that is slow for a while.
    For 5 pairs and more: of 3, what it calls 95 % is 74 %.

    Args:
        above, below: samples of one unit; sample i of both was taken at the same time.
        confidence: of the interval.
    """
    import numpy as np

    ratios = np.asarray(above, np.float64) / np.asarray(below, np.float64)
    draw = np.random.Generator(np.random.PCG64(0))  # fixed: the same samples give the same interval
    many = np.median(ratios[draw.integers(0, len(ratios), (RESAMPLES, len(ratios)))], axis=1)
    low, high = np.percentile(many, [50 - 50 * confidence, 50 + 50 * confidence])
    return Interval(float(np.median(ratios)), float(low), float(high))


def spread(samples: Sequence[float]) -> float:
    """The standard deviation; 0 of one sample."""
    return statistics.stdev(samples) if len(samples) > 1 else 0.0


def rotated(names: Iterable[Name], turn: int) -> list[Name]:
    """Returns the order of a round: each name once, with a different first name in each turn."""
    every = list(names)
    first = turn % max(1, len(every))
    return every[first:] + every[:first]


def in_turns(arms: Mapping[Name, Callable[[], float]], rounds: int) -> dict[Name, list[float]]:
    """Returns samples of each arm, in rounds in which each comes once, another one first each time."""
    samples: dict[Name, list[float]] = {name: [] for name in arms}
    for turn in range(rounds):
        for name in rotated(arms, turn):
            samples[name].append(arms[name]())
    return samples


def milliseconds(samples: Sequence[float]) -> str:
    """Returns the median of seconds as text, in milliseconds."""
    return f"{statistics.median(samples) * 1e3:.2f} ms"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as aligned columns, the first row a heading; the first column to the left, others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def machine() -> dict[str, Any]:
    """Returns the machine of the measurements: processor, cores, load, versions."""
    system = os.uname()  # platform.platform() says the same, but starts a process for it
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": f"{system.sysname}-{system.release}-{system.machine}-with-{''.join(platform.libc_ver())}",
        "python": platform.python_version(),
        "versions": {"hvdtrain": __version__}
        | versions("horovod", "keras", "tensorflow", "tensorflow-cpu", "torch", "torchvision", "accelerate", "numpy"),
    }


# other distributions of the same module: a ready wheel
_ALSO = {"horovod": ("hvdtrain-horovod",)}


def versions(*packages: str) -> dict[str, str]:
    """Versions of the packages that are installed."""
    import importlib.metadata

    found: dict[str, str] = {}
    for package in packages:
        for name in (package, *_ALSO.get(package, ())):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found.setdefault(package, importlib.metadata.version(name))
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def of_saves(saves: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what a run's checkpoints took, of the fields of their events (`RunLog.checkpoint`)."""
    sealed = [save for save in saves if save["sealed_s"] is not None]
    return {
        "saves": len(saves),
        "failed": len(saves) - len(sealed),
        "blocked_s": math.fsum(save["blocked_s"] for save in saves),
        "blocked_median_s": statistics.median(save["blocked_s"] for save in saves),
        "sealed_median_s": statistics.median(save["sealed_s"] for save in sealed) if sealed else None,
        "bytes": sealed[-1]["bytes"] if sealed else None,
    }
