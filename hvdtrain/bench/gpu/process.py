"""One check: run to its end, or ended; what it found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hvdtrain.bench.gpu.found import MARK

ENDS_WITHIN_S = 8.0  # of being asked to: a launcher ends its ranks first
LINES = 12


@dataclass(frozen=True)
class CheckOutcome:
    """What came of a check.

    Attributes:
        result: ok, MISSED (a goal), FAILED (by itself, or ended), "not here" (what it needs), "left out" (for time).
        reason: why not ok, in a line.
        goals, figures: see `found.say`.
        seconds: it took.
        output: its last lines, if it failed.
    """

    result: str
    reason: str
    goals: list[dict[str, Any]]
    figures: dict[str, Any]
    seconds: float
    output: str = ""


def outcome_of(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> CheckOutcome:
    """Runs a check's command, in a folder of its own."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hvdtrain-gpu-") as folder:
        process = subprocess.Popen(
            command, cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        try:
            output, late = process.communicate(timeout=limit_s)[0], False
        except subprocess.TimeoutExpired:
            output, late = _ended(process), True
    seconds = time.monotonic() - started
    found = [json.loads(line.split(MARK, 1)[1]) for line in output.splitlines() if MARK in line]
    tail = "\n".join(output.strip().splitlines()[-LINES:])
    if late:
        return CheckOutcome("FAILED", f"ended after {limit_s:.0f} s", [], {}, seconds, tail)
    if found and "not here" in found[-1]:  # whatever a launcher makes of the exit code
        return CheckOutcome("not here", found[-1]["not here"], [], {}, seconds)
    if process.returncode or not found:
        return CheckOutcome("FAILED", f"exit code {process.returncode}: {_last(output)}", [], {}, seconds, tail)
    goals, figures = found[-1]["goals"], found[-1]["figures"]
    missed = [goal for goal in goals if not goal["kept"]]
    reason = "; ".join(f"{goal['what']} {goal['value']:.4g} is above {goal['limit']:g}" for goal in missed)
    return CheckOutcome("MISSED" if missed else "ok", reason, goals, figures, seconds)


def _ended(process: subprocess.Popen[str]) -> str:
    """Ends a check and all that it started; returns what it had printed."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=ENDS_WITHIN_S)[0]
    return ""


def _last(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if ("Error" in line or "error:" in line) and "ChildFailed" not in line]
    return (errors or lines or ["nothing was printed"])[-1][:200]
