"""The record of a hang, as JSON on rank 0's host: every rank's report and stacks.

For ranks out of step: the place of each.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain.comm.ring import FOLDER, own_folder
from hvdtrain.watch.looks import proc_status

_NATIVE_S = 5.0


def state_of_process(pid: int) -> dict[str, Any]:
    """Returns the kernel's facts on a rank of this host: state, wchan, debugger; {"gone": True} if it has ended."""
    status = proc_status(pid)
    if not status or status.get("State", "").startswith(("Z", "X")):
        return {"gone": True}
    wchan = ""
    with contextlib.suppress(OSError):
        wchan = Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8").strip("0")
    tracer = status.get("TracerPid", "0")
    return {
        "state": status["State"],
        "wchan": wchan,
        "debugger": f"process {tracer} traces it" if tracer != "0" else "",
    }


def native_stack(pid: int) -> str:
    """Returns the frames of a process that does not answer, by py-spy; "" where it is not installed, or may not."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))
    for way in ("--native", "--nonblocking") if program is not None else ():  # the second of one that is stopped
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = [str(program), "dump", way, "--pid", str(pid)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_NATIVE_S, check=True)
            return done.stdout[done.stdout.find("Thread ") :]  # what comes before has the command line, and secrets
    return ""


def path_of(run_dir: Path | None) -> Path | None:
    """Returns the file for a hang of now; None where no folder can be had for it."""
    folder = run_dir / FOLDER if run_dir is not None else own_folder()
    name = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + ("" if run_dir is not None else f"-{os.getpid()}")
    with contextlib.suppress(OSError):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            return folder / f"{name}.json"
    return None


def write(
    path: Path | None,
    error: Sequence[str],
    verdict: Any,
    reports: Mapping[int, Mapping[str, Any]],
    silent: Mapping[int, Mapping[str, Any]],
) -> None:
    """Writes the file; prints an error instead of raising it, because the job must end in any case."""
    if path is None:
        return
    found = {
        "format": 1, "time": time.time(), "rule": error[0], "received": error[1], "remedy": error[2],
        "verdict": asdict(verdict), "ranks": [*reports.values()], "silent": [*silent.values()],
    }  # fmt: skip
    try:
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    except OSError as problem:
        print(f"hvdtrain: {path}: {problem}", file=sys.stderr, flush=True)
