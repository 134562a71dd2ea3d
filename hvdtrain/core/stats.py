"""Medians, bootstrap intervals and tables: what benchmarks and tuning say their numbers with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.core.version import __version__

RESAMPLES = 4000


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio_of_medians(above: Sequence[float], below: Sequence[float], *, paired: bool) -> Ratio:
    """``median(above) / median(below)``, and the interval a bootstrap gives it (Efron 1979, percentiles).

    Args:
        above, below: samples of one unit.
        paired: sample i of both was taken at the same time: then it is the median of the ratios of pairs, and pairs are
            drawn, so that a machine that is slow for a while does not count.
    """
    import numpy as np

    a, b = np.asarray(above, np.float64), np.asarray(below, np.float64)
    draw = np.random.Generator(np.random.PCG64(0))  # fixed: the same samples give the same interval
    if paired:
        ratios = a / b
        value = float(np.median(ratios))
        many = np.median(ratios[draw.integers(0, len(ratios), (RESAMPLES, len(ratios)))], axis=1)
    else:
        value = float(np.median(a) / np.median(b))
        many = np.median(a[draw.integers(0, len(a), (RESAMPLES, len(a)))], axis=1)
        many = many / np.median(b[draw.integers(0, len(b), (RESAMPLES, len(b)))], axis=1)
    low, high = np.percentile(many, [2.5, 97.5])
    return Ratio(value, float(low), float(high))


def median(samples: Sequence[float]) -> float:
    """The median."""
    return statistics.median(samples)


def milliseconds(samples: Sequence[float]) -> str:
    """The median of seconds, told in milliseconds."""
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
    """What the numbers were taken on: processor, cores, load, versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {"hvdtrain": __version__}
        | versions("horovod", "keras", "tensorflow", "tensorflow-cpu", "torch", "torchvision", "accelerate", "numpy"),
    }


def versions(*packages: str) -> dict[str, str]:
    """Versions of the packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
