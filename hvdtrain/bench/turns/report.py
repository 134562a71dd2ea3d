"""The frame of every benchmark: checks before it, progress while it measures, and its result as a file and tables."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from hvdtrain.core import flags
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.launchers import detect
from hvdtrain.record import stats


def begin(bench: str, args: argparse.Namespace, rule: str) -> dict[str, Any]:
    """A result without figures yet.

    Args:
        bench: its name, as on the command line.
        rule: why it is not started by a launcher.

    Raises:
        ConfigError: started by a launcher, or no place for the result.
    """
    if detect(os.environ).launcher != "none":
        raise ConfigError(rule, "started by a launcher", f"hvdtrain bench {bench}")
    flags.check_file("--out", args.out, parents=True)  # minutes of measuring must not end in an error about it
    return {
        "format": 1, "bench": bench, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "machine": stats.machine(),
        "settings": {key: value for key, value in vars(args).items() if isinstance(value, (int, float, str, list))},
    }  # fmt: skip


def progress(text: str) -> None:
    """Goes to standard error, so that the table can be piped."""
    print(text, file=sys.stderr, flush=True)


def finish(args: argparse.Namespace, result: dict[str, Any], report: Callable[[Mapping[str, Any]], str]) -> int:
    """Writes every sample, prints the tables; returns 0."""
    result["load_after"] = round(os.getloadavg()[0], 2)
    flags.write_file("--out", args.out, json.dumps(result, indent=1) + "\n")
    print(report(result))
    print(f"every sample: {args.out}", flush=True)
    return 0


def measured_on(result: Mapping[str, Any]) -> str:
    """The machine, and what else it had to do."""
    machine = result["machine"]
    return (
        f"{machine['processor']}, {machine['cores_usable']} cores, load {machine['load_1min']} before,"
        f" {result['load_after']} after"
    )


def rates(title: str, images_per_s: Mapping[str, Sequence[float]], base: str) -> str:
    """A table of images a second, and of how many times those of `base` they are."""
    rows = [(title, "images/s", f"x {base}")]
    for name, its in images_per_s.items():
        rows.append((name, f"{median(its):,.0f}", f"{median(its) / median(images_per_s[base]):.2f}"))
    return stats.table(rows)


def heading(what: str, result: Mapping[str, Any]) -> str:
    """What was measured, on which machine, with which versions: a line each."""
    versions = " ".join(f"{name} {version}" for name, version in result["machine"]["versions"].items())
    return "\n".join(filter(None, [what, measured_on(result), versions]))
