"""`hvdtrain bench gpu` without a GPU: every program of it is tried, one that fails or hangs stops no other, and the kit
that goes to a machine without network says what it lacks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import REPOSITORY, clean_environment

from hvdtrain.bench.gpu import CHECKS, outcome_of

SPEC = importlib.util.spec_from_file_location("gpu_kit", REPOSITORY / "scripts" / "gpu_kit.py")
assert SPEC is not None and SPEC.loader is not None
gpu_kit = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gpu_kit)

CHECK = """
import sys
from hvdtrain.bench.gpu import check, right
from hvdtrain.bench.gpu.check import Goal
def machine(args):
    {}
right.machine = machine
sys.argv[1:] = ["right.machine", "--device=cpu"]
check.main()
"""
CASES = {
    "ok": ("return [Goal('gap', 1e-12, 1e-10)], {'ranks': 2}", ""),
    "MISSED": ("return [Goal('gap', 0.5, 1e-10), Goal('no', float('nan'), 1.0)], {}", "gap 0.5 is above 1e-10; no nan"),
    "FAILED": ("raise ValueError('no such layer')", "it ended with 1: ValueError: no such layer"),
}


@pytest.mark.parametrize("result", CASES)
def test_what_comes_of_a_check(result: str) -> None:
    code, reason = CASES[result]
    found = outcome_of([sys.executable, "-c", CHECK.format(code)], 1, 60.0)
    assert found.result == result and reason in found.reason, found
    assert (found.figures == {"ranks": 2}) == (result == "ok")


def test_a_check_that_hangs_is_ended_with_what_it_started() -> None:
    found = outcome_of(["sh", "-c", "sleep 600 & echo $!; wait"], 1, 1.0)
    assert found.result == "FAILED" and "it took too long" in found.reason
    status = Path("/proc", found.output.split()[-1], "status")
    assert not status.exists() or "State:\tZ" in status.read_text()  # nobody may have asked how it ended


def tried(
    folder: Path, *only: str, flags: tuple[str, ...] = ("--device=cpu", "--tiny"), code: int = 0
) -> dict[str, Any]:
    """Runs checks, by default on the CPU; returns the result by check."""
    out = folder / "found.json"
    command = ["-m", "hvdtrain", "bench", "gpu", *flags, f"--out={out}", "--only", *only]
    environment = clean_environment()
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == code, done.stdout + done.stderr
    checks = json.loads(out.read_text())["checks"]
    assert set(checks) == set(only) and all(name in done.stdout for name in only)
    return {name: found["result"] for name, found in checks.items()}


def test_the_exit_code_says_that_something_is_not_right(tmp_path: Path) -> None:
    """No time was left for what was asked for."""
    assert set(tried(tmp_path, "solo", "speed", flags=("--seconds=1",), code=1).values()) == {"skipped"}


@pytest.mark.slow
@pytest.mark.thorough
def test_every_check_runs(tmp_path: Path) -> None:
    results = tried(tmp_path, *(check.name for check in CHECKS))
    here = "ok" if importlib.util.find_spec("deepspeed") else "not here"
    assert results == {check.name: here if check.name == "deepspeed" else "ok" for check in CHECKS}


@pytest.mark.thorough
def test_a_kit_without_an_index_is_what_can_be_made(tmp_path: Path) -> None:
    """Of hvdtrain alone: what is missing is named; the script there finds its wheel, and says what it would run."""
    kit = tmp_path / "kit"
    program = REPOSITORY / "scripts" / "gpu_kit.py"
    command = [sys.executable, str(program), str(kit), "--python", "/no/python", f"--cache={tmp_path}"]
    environment = clean_environment({"PIP_NO_INDEX": "1"})
    environment = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    record = json.loads((kit / "kit.json").read_text())
    assert [name.split("-")[0] for name in record["wheels"]] == ["hvdtrain"]
    assert set(record["missing"]) == {"packages", "Horovod with NCCL"}
    assert "MISSING Horovod with NCCL" in done.stdout and "/no/python" in record["missing"]["Horovod with NCCL"]
    check = ["bash", str(kit / "gpu_check.sh"), "--dry-run"]
    done = subprocess.run(
        check, capture_output=True, text=True, env=environment | {"PYTHON": sys.executable}, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{entry.name} (at most {entry.limit_s} s): {entry.what}" in done.stdout for entry in CHECKS)
    assert str(REPOSITORY) not in done.stdout.replace(sys.executable, "") and os.listdir(kit / "wheels")
