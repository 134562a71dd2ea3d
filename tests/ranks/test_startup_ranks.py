"""Flags, imports, cores and run directories, before any framework is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import run_ranks


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_notes_on_file_descriptor_2(asked: bool, fails: bool) -> None:
    """Hidden unless asked for or the import fails; and the descriptor works again afterwards."""
    code = (
        "import os, sys, contextlib\nfrom hvdtrain.world.startup import quiet\n"
        "with contextlib.suppress(ValueError), quiet():\n"
        " os.write(2, b'NOTE\\n')\n"
        f" if {fails}: raise ValueError\n"
        "print('after', file=sys.stderr)"
    )
    env = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    env |= {"TF_CPP_MIN_LOG_LEVEL": "0"} if asked else {}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert ("NOTE" in done.stderr) == (asked or fails)
    assert "after" in done.stderr


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("module", "flags"),
    [
        ("keras_mnist", ["--data", "digits"]),
        ("torch_resnet", ["--model", "resnet18", "--data", "digits", "--save-every", "20"]),
    ],
)
def test_programs_of_a_restarted_job_go_on(module: str, flags: list[str], tmp_path: Path) -> None:
    """The same command line: refused as another job's, gone on with as its own."""
    command = ["-m", f"hvdtrain.{module}", *flags, "--run-dir", str(tmp_path / "run"), "--epochs"]
    first = run_ranks([*command, "1"], 1, launcher="none", env={"HVDTRAIN_JOB": "ours"}, timeout_s=200).check()
    again = {"HVDTRAIN_JOB": "theirs", "HVDTRAIN_RESTART": "1"}
    refused = run_ranks([*command, "2"], 1, launcher="none", env=again, timeout_s=200)
    assert refused.returncode == 2 and "holds a run" in refused.err, refused.text
    again |= {"HVDTRAIN_JOB": "ours"}
    run_ranks([*command, "2"], 1, launcher="none", env=again, timeout_s=200).check()
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [attempt["job"] for attempt in run["attempts"]] == ["ours", "ours"] and run["status"] == "finished"
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["epoch"] for event in events if event["kind"] == "epoch"] == [0, 1], first.text
