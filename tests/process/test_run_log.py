"""A run log ends with its program, as the program did, though nothing has ended it; and with no other process."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import run_ranks
from run_logs import strict

from hvdtrain.record.log import read_run, run_status

# each step is an event, which is in a buffer for the first second
PROGRAM = """
import os, sys
from hvdtrain import Preempted, RunLog, World

log = RunLog("run", World.solo(), config={{}}, progress=False, tensorboard={board})
for step in (1, 2):
    log._window._due = 0.0
    log.step(step=step, epoch=0, samples_seen=step, loss=1.0, lr=0.1, samples=1, seconds={{"forward": 0.2}})
{end}
"""
# how a program ends: what is recorded, and its exit code
ENDS = {
    "pass": ("finished", None, 0),
    "sys.exit(0)": ("finished", None, 0),
    "sys.exit(3)": ("failed", "SystemExit: 3", 3),
    "exit(3)": ("failed", "SystemExit: 3", 3),
    "raise ValueError('no data')": ("failed", "ValueError: no data", 1),
    "raise Preempted": ("preempted", None, 85),
    "os._exit(0)": ("killed", None, 0),  # the twin: it could not say anything
}
CHILD = """
if not (child := os.fork()):
    {ends}
assert os.waitpid(child, 0)[0] == child
"""


@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_does_not_end_its_run_log_is_recorded_as_it_ended(end: str, tmp_path: Path) -> None:
    status, error, code = ENDS[end]
    done = run_ranks(["-c", PROGRAM.format(end=end, board=False)], 1, launcher="none", cwd=tmp_path, timeout_s=60)
    run = read_run(tmp_path / "run")
    assert done.returncode == code and run is not None, done.text
    assert (run_status(tmp_path / "run"), run["error"]) == (status, error), done.text
    kinds = [event["kind"] for event in strict(tmp_path / "run" / "events.jsonl")]
    assert kinds == (["start"] if status == "killed" else ["start", "step", "step", "end"])


@pytest.mark.parametrize("ends", ["with log: sys.exit(3)", "raise ValueError"])
def test_a_forked_child_that_ends_does_not_end_its_parents_run_log(ends: str, tmp_path: Path) -> None:
    """And does not write a second time what was in the parent's buffers."""
    end = (
        f"{CHILD.format(ends=ends)}\nlog.event('note', status=__import__('json').load(open('run/run.json'))['status'])"
    )
    done = run_ranks(["-c", PROGRAM.format(end=end, board=True)], 1, launcher="none", cwd=tmp_path, timeout_s=60)
    done.check()
    events = strict(tmp_path / "run" / "events.jsonl")
    assert [event["kind"] for event in events] == ["start", "step", "step", "note", "end"], done.text
    assert events[3]["status"] == "running" and run_status(tmp_path / "run") == "finished"
    (board,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert board.read_bytes().count(b"train/loss") == 2
