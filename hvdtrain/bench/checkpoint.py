"""What a checkpoint costs training, in paired runs on this machine: how long training waits for one that is written
before it goes on, and for one that another process writes; and how long updates take while that writes.

Each in one process with one thread, so that a second core is free. Prints a table and writes a JSON file with every
sample. Give the machine nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.bench.turns.report import begin, finish, heading, progress
from hvdtrain.bench.turns.turns import ONE_THREAD
from hvdtrain.core.errors import HvdtrainError
from hvdtrain.core.flags import whole
from hvdtrain.record import stats

ARMS = {
    "torch": ("PyTorch", ["--framework=torch"], {}),
    "keras": ("Keras on TensorFlow", ["--framework=keras"], {"KERAS_BACKEND": "tensorflow"}),
    "keras-torch": ("Keras on PyTorch", ["--framework=keras"], {"KERAS_BACKEND": "torch"}),
}
LAYER_MB = 8.0  # with its momentum


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain bench checkpoint`."""
    count = whole(1)
    add = parser.add_argument
    add("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM", help=f"(default: {' '.join(ARMS)})")
    add("--megabytes", type=count, default=400, metavar="N", help="of weights and momentum (default: %(default)s)")
    add("--rounds", type=count, default=7, metavar="N", help="of one save in each way (default: %(default)s)")
    add("--steps", type=count, default=10, metavar="N", help="updates alone in a round (default: %(default)s)")
    add("--directory", type=Path, metavar="DIR", help="on the disk to write to (default: temporary files')")
    add("--out", type=Path, default=Path("bench-checkpoint.json"), metavar="FILE", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; returns 0, whatever the figures are."""
    result = begin("checkpoint", args, "a benchmark starts its own processes")
    result["arms"] = {}
    for number, arm in enumerate(args.arms, 1):
        progress(f"{number}/{len(args.arms)} {ARMS[arm][0]}")
        with tempfile.TemporaryDirectory(prefix="hvdtrain-checkpoint-", dir=args.directory) as folder:
            result["arms"][arm] = measure(args, arm, folder)
    return finish(args, result, report)


def measure(args: argparse.Namespace, arm: str, folder: str) -> dict[str, Any]:
    """The samples of one arm, and ratios of pairs."""
    name, options, environment = ARMS[arm]
    layers = max(1, round(args.megabytes / LAYER_MB))
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain.bench.checkpoint_job", *options, f"--layers={layers}",
         f"--rounds={args.rounds}", f"--steps={args.steps}", f"--directory={folder}"],
        env=os.environ | ONE_THREAD | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise HvdtrainError(f"{name} must be able to save", done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["blocked_ratio"] = vars(stats.ratio_of_medians(found["later"], found["at once"]))
    found["step_ratio"] = vars(stats.ratio_of_medians(found["beside"], found["alone"]))
    return found


def report(result: Mapping[str, Any]) -> str:
    """The table of a result."""
    rows: list[tuple[str, ...]] = [
        ("training waits for", "a save at once", "one later", "ratio, 95 %", "which is there after", "an update",
         "beside it, 95 %", "in memory"),
        *(
            (
                ARMS[arm][0], *(stats.milliseconds(found[name]) for name in ("at once", "later")),
                str(stats.Interval(**found["blocked_ratio"])),
                *(stats.milliseconds(found[name]) for name in ("sealed", "alone")),
                str(stats.Interval(**found["step_ratio"])), f"{found['image_bytes'] / 1e6:.0f} MB",
            )
            for arm, found in result["arms"].items()
        ),
    ]  # fmt: skip
    sizes = sorted({round(found["bytes"] / 1e6) for found in result["arms"].values()})
    what = f"checkpoints of {' to '.join(map(str, sizes))} MB, one process, one thread"
    return f"{heading(what, result)}\n\n{stats.table(rows)}"
