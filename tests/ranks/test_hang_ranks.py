"""A rank that does not come to what the others wait in is named with its line within 10 s; a slow one is left alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import parted_ranks
import pytest
from harness import PROGRAMS, Result, together
from parted_ranks import NAMED_WITHIN_S, two_at_a_time

from hvdtrain.comm.ring import FOLDER
from hvdtrain.commands.why import why
from hvdtrain.core import variables
from hvdtrain.core.errors import HUNG_CODE

TORCH, KERAS = PROGRAMS / "torch" / "hang.py", PROGRAMS / "keras" / "hang.py"
RULE = "ranks must not keep others waiting in a collective operation"
HANGING = ["endless_loop", "lock", "waits_for_a_thread", "data_worker", "sleeps", "skips_evaluate", "hook"]
SILENT = ["slow_first_step", "long_checkpoint", "traced", "preprocesses", "computes_long"]
LAUNCHERS = {"horovod": "forked", "ddp": "torchrun"}


def start(program: Path, arguments: list[str], folder: Path, launcher: str = "forked", **env: str) -> Result:
    watched = {variables.RUN_DIR: str(folder), variables.HANG_S: "3", **env}
    return parted_ranks.start(program, arguments, folder, launcher, **watched)


def torch_way(way: str, tmp_path: Path, engine: str = "horovod", launcher: str = "") -> Callable[[], Result]:
    return lambda: start(TORCH, [engine, way], tmp_path / way, launcher or LAUNCHERS[engine])


def check_hung(done: Result, folder: Path, said: str = "# here") -> str:
    """The job has ended with one error that names rank 1 and its line, in time; returns it."""
    assert done.returncode != 0, done.text
    error = done.ranks_error[0]
    assert RULE in error, done.text
    line = next(line for line in error.splitlines() if "rank 1 (host " in line)
    assert "has not reached the collective" in line and said in line, done.text
    assert "rank 0 waits in " in error and "fix: " in error, done.text
    parted = [float(file.read_text()) for file in folder.glob("parted.*")]
    lived = (folder / "0").stat().st_mtime - max(parted)
    assert lived <= NAMED_WITHIN_S, f"{lived:.1f} s"
    (file,) = (path for path in (folder / FOLDER).iterdir() if path.suffix != ".ring" or said == "# here")
    kept = json.loads(file.read_text())
    assert str(file) in error and RULE in why(folder) and kept["received"] in error.replace("\n            ", "\n")
    assert kept["ranks"][0]["at"] is not None
    return error


def test_torch_ranks_that_hang(tmp_path: Path) -> None:
    done = torch_way("skips_evaluate", tmp_path)()
    assert "evaluate" in check_hung(done, tmp_path / "skips_evaluate")
    assert RULE in done.ranks_error[1], "every rank says so"


def test_a_failed_rank_that_a_thread_keeps_is_named_as_failed(tmp_path: Path) -> None:
    done = torch_way("fails_with_a_thread", tmp_path)()
    assert "ValueError: boom" in done.ranks_error[1] and done.returncode != 0, done.text
    assert re.search(r"rank 1 \(host .*\) has failed \(ValueError, see its output\)", done.ranks_error[0]), done.text
    assert "daemon=True" in done.ranks_error[0], done.text


@pytest.mark.thorough
def test_a_rank_that_was_stopped(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "py-spy").write_text('#!/bin/sh\necho "Thread 7 of process $4: poll (libc.so)"\n')
    (tools / "py-spy").chmod(0o755)
    folder = tmp_path / "stopped"
    done = start(TORCH, ["horovod", "stopped"], folder, PATH=f"{tools}{os.pathsep}{os.environ['PATH']}")
    error = check_hung(done, tmp_path / "stopped", "does not answer: process state T")
    assert "2 update(s) done" in error and "kill -CONT" in error
    assert re.search(r"of process \d+: poll \(libc.so\)", error), "what py-spy says, where it is installed"


@pytest.mark.thorough
def test_slow_torch_ranks_are_left_alone(tmp_path: Path) -> None:
    for way, done in zip(SILENT, two_at_a_time(*(torch_way(way, tmp_path) for way in SILENT)), strict=True):
        done.check()
        assert all("done" in done.ranks_output[rank] for rank in range(2)), done.text
        assert not (tmp_path / way / FOLDER).exists(), "pages are removed at the end"
        assert ("moves" in done.err, "a debugger traces" in done.err) == (way == "preprocesses", way == "traced")


def test_keras_ranks_that_hang(tmp_path: Path) -> None:
    check_hung(start(KERAS, [], tmp_path, KERAS_BACKEND="torch"), tmp_path)


def test_a_rank_that_is_killed_leaves_its_page(tmp_path: Path) -> None:
    """Nobody can say a word; what it did is on its page."""
    with killed_when_parted(tmp_path):
        done = start(TORCH, ["horovod", "endless_loop"], tmp_path, **{variables.HANG_S: "60"})
    assert done.returncode != 0 and RULE not in done.text
    said = why(tmp_path)
    assert re.search(r"rank 1 \(host \S+, process \d+\): last report .*: 2 update\(s\) done", said), said


@contextlib.contextmanager
def killed_when_parted(folder: Path) -> Iterator[None]:
    """Kills rank 1 with SIGKILL a while after the ranks have parted."""

    def kill() -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until and not (folder / "parted.1").exists():
            over.wait(0.1)
        over.wait(2.0)
        from hvdtrain.comm.ring import read_ring

        page = read_ring(folder / FOLDER / "rank-1.ring")
        if page is not None:
            os.kill(page["pid"], signal.SIGKILL)

    over = threading.Event()
    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# -- every launcher, engine and backend ----------------------------------------------------------------------------
@pytest.mark.thorough
@pytest.mark.parametrize("way", [way for way in HANGING])
def test_every_way_to_hang(way: str, tmp_path: Path) -> None:
    check_hung(torch_way(way, tmp_path)(), tmp_path / way)


@pytest.mark.thorough
def test_under_mpirun_the_exit_code_is_the_ranks(tmp_path: Path) -> None:
    loop, stopped = together(
        torch_way("endless_loop", tmp_path, launcher="mpirun"), torch_way("stopped", tmp_path, launcher="mpirun")
    )
    check_hung(loop, tmp_path / "endless_loop")
    check_hung(stopped, tmp_path / "stopped", "does not answer: process state T")
    assert loop.returncode == stopped.returncode == HUNG_CODE


@pytest.mark.thorough
def test_without_the_watch_it_goes_on(tmp_path: Path) -> None:
    """The negative twin."""
    done = start(TORCH, ["horovod", "sleeps_12_s"], tmp_path, **{variables.HANG_S: "0"}).check()
    assert RULE not in done.text
    check_hung(start(TORCH, ["horovod", "sleeps_12_s"], tmp_path / "with"), tmp_path / "with")
