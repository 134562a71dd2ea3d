"""A run log goes on: in its folder, wherever the program goes, where its lines go nowhere, beside what is there."""

from __future__ import annotations

import importlib.util
import io
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from run_logs import one_step, open_log, strict

from hvdtrain import ConfigError
from hvdtrain.record import log_files
from hvdtrain.record.log import read_run

ABSENT = 2**22 + 1  # no process has a larger number than 2**22 (proc(5), pid_max)
SINCE = "since 2026-01-02T03:04:05+00:00"


def test_a_program_that_changes_its_folder_goes_on_writing_in_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with open_log(Path("run")) as log:
        monkeypatch.chdir("elsewhere")
        one_step(log, 1)
        log.result(accuracy=0.5)
        assert log.path("figure.png") == tmp_path / "run" / "figure.png"
    run = read_run(tmp_path / "run")
    assert run is not None and run["status"] == "finished" and run["result"]["accuracy"] == 0.5
    assert [event["kind"] for event in strict(tmp_path / "run" / "events.jsonl")] == ["start", "step", "end"]
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert not Path("run", "run.json").exists(), "the twin: by its name from here there is none"


@pytest.mark.parametrize("resume", [False, True])
def test_events_without_a_run_are_neither_added_to_nor_lost(resume: bool, tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    events.write_text('{"kind": "start"}\n')
    with pytest.raises(ConfigError, match="cannot hold two runs") as caught:
        open_log(tmp_path, resume=resume)
    assert f"{tmp_path} holds the events of a run (events.jsonl), and no run.json" in caught.value.received
    assert events.read_text() == '{"kind": "start"}\n' and not (tmp_path / "run.json").exists()
    events.rename(tmp_path / "events-of-another.jsonl")
    with open_log(tmp_path, resume=resume):
        pass  # the twin, and the lock was given back


class Gone(io.StringIO):
    """A pipe whose reader has ended."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize(
    ("out", "error"), [(Gone, Gone), (closed, io.StringIO), (io.StringIO, lambda: None)], ids=["pipe", "closed", "none"]
)
def test_a_run_whose_lines_go_nowhere_ends_well(
    out: Any, error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every line that a run log prints: progress, epochs, the verdict, what it lacks, what it could not write."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name == "tensorboard" else find_spec(name)
    )
    monkeypatch.setattr(sys, "stdout", out())
    monkeypatch.setattr(sys, "stderr", error())  # None: closed when Python began
    if out is not io.StringIO:
        with pytest.raises((BrokenPipeError, ValueError)):
            print("the twin", flush=True)
    with open_log(tmp_path / "run", progress=True, tensorboard=True) as log:
        for step in (1, 2):
            one_step(log, step, input=9.0, forward=1.0)
            log.epoch(step - 1, {"loss": 0.5}, 10.0)
        log._say_once_if_unknown([{"error": "the driver is gone"}])
        log._guarded(_full)
    run = read_run(tmp_path / "run")
    assert run is not None and run["status"] == "finished" and run["error"] is None
    assert run["result"]["verdict"].startswith("input bound")
    kinds = [event["kind"] for event in strict(tmp_path / "run" / "events.jsonl")]
    assert kinds == ["start", "step", "epoch", "step", "epoch", "end"]


def _full() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("pid", "host", "ended"),
    [
        (ABSENT, socket.gethostname(), True),
        (os.getpid(), socket.gethostname(), False),
        (ABSENT, "another-host", False),  # of which nothing is known here
    ],
    ids=["ended", "runs", "another host"],
)
def test_a_directory_that_a_child_of_an_ended_program_holds_says_so(
    pid: int, host: str, ended: bool, tmp_path: Path
) -> None:
    wrote = f"pid {pid} on {host} {SINCE}"
    with open_log(tmp_path):
        (tmp_path / ".lock").write_text(wrote + "\n")  # as the program did that has started this one
        with pytest.raises(ConfigError, match="two runs at once") as caught:
            open_log(tmp_path, resume=True)
        owner = f"a process that was started by {wrote}, which has ended" if ended else wrote
        assert caught.value.received == f"{tmp_path} is in use by {owner}"
        assert log_files.locked_by(tmp_path) == owner
    assert log_files.locked_by(tmp_path) is None
