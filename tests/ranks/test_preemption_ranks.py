"""SIGTERM or SIGUSR1 to a rank, or to the launcher: all ranks save after the same update, and go on bit-equal."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import PROGRAMS, REPOSITORY, Result, clean_environment, run_ranks

TORCH, KERAS = PROGRAMS / "torch" / "preempted.py", PROGRAMS / "keras" / "preempted.py"
OUTSIDE = PROGRAMS / "torch" / "told_outside.py"
CODE = 85
LOST = "the process that wrote it was killed by SIGKILL"


def launched(folder: Path, *program: str | Path, flags: tuple[str, ...] = (), **env: str) -> Result:
    """Runs a program on two ranks by `hvdtrain launch`."""
    command = ["-m", "hvdtrain", "launch", "-np", "2", "--no-checks", *flags, "--log-dir", str(folder / "logs")]
    return run_ranks([*command, "--", sys.executable, *program], 1, launcher="none", env=env, timeout_s=120)


def trained(text: str) -> str:
    found = [line for line in text.splitlines() if "trained " in line]
    assert found, text
    return found[0].rpartition("trained ")[2]


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name.partition("-step-")[2]) for path in folder.glob("epoch-*"))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("unbroken")
    return trained(run_ranks([TORCH, folder / "run"], 2).check().out)


@pytest.mark.parametrize(
    ("place", "number", "rank", "steps"),
    [
        # a job that ends has no next save, which would report the lost checkpoint, and replace it
        ("lost", 4, "1", [3, 5]),
        pytest.param("update", 1, "1", [2], marks=pytest.mark.thorough),
        # learned in the epoch's last update: its own checkpoint is the one
        pytest.param("update", 2, "0", [3], marks=pytest.mark.thorough),
        pytest.param("accumulation", 4, "1", [3, 5], marks=pytest.mark.thorough),
        pytest.param("validation", 0, "0", [3, 4], marks=pytest.mark.thorough),
        pytest.param("save", 0, "0", [3, 4], marks=pytest.mark.thorough),
    ],
)
def test_all_ranks_save_after_the_same_update(
    place: str, number: int, rank: str, steps: list[int], unbroken: str, tmp_path: Path
) -> None:
    ended = launched(tmp_path, TORCH, tmp_path / "run", place, str(number), rank)
    assert ended.returncode == CODE, ended.text
    assert "got SIG" in ended.text and "preempted: " in ended.out and "Traceback" not in ended.text, ended.text
    assert "hvdtrain launch: the job was preempted" in ended.err, ended.text
    assert saved(tmp_path / "run") == steps and (LOST in ended.err) is (place == "lost"), ended.text
    assert trained(run_ranks([TORCH, tmp_path / "run"], 2).check().out) == unbroken


def told_by_the_launcher(number: signal.Signals, folder: Path, *program: str | Path) -> tuple[int, str]:
    """Sends a launcher a signal once both ranks wait for it; returns its exit code, and the rest of the output."""
    flags = ["launch", "-np", "2", "--no-checks", "--grace=30", "--max-restarts=2", "--log-dir", str(folder / "logs")]
    command = [sys.executable, "-m", "hvdtrain", *flags, "--", sys.executable, *program]
    job = subprocess.Popen(
        command, cwd=REPOSITORY, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert job.stdout is not None
        lines: list[str] = []
        while sum("waiting to be told" in line for line in lines) < 2:
            lines.append(job.stdout.readline())
            assert lines[-1], "".join(lines)
        job.send_signal(number)
        rest = job.communicate(timeout=40)[0]
    finally:
        job.kill()
        job.wait()
    assert "restart 1" not in rest, rest
    return job.returncode, rest


@pytest.mark.thorough
@pytest.mark.parametrize(("place", "code", "ends"), [("before", CODE, 0), ("after", 0, 2)])
def test_outside_the_world_no_rank_dies_by_it(place: str, code: int, ends: int, tmp_path: Path) -> None:
    """Before: the ranks end together in `init`. After: the program comes to its end, as an export may still run."""
    found, rest = told_by_the_launcher(signal.SIGUSR1, tmp_path, OUTSIDE, place)
    assert found == code and rest.count("at the end") == ends, rest
    assert ("preempted before the training began" in rest) is (place == "before"), rest


@pytest.mark.parametrize(
    ("backend", "arguments", "steps"),
    [
        ("torch", ["19", "lost"], [19]),
        pytest.param("tensorflow", ["11"], [8, 11], marks=pytest.mark.thorough),
        pytest.param("torch", ["11"], [8, 11], marks=pytest.mark.thorough),
    ],
)
def test_keras(backend: str, arguments: list[str], steps: list[int], tmp_path: Path) -> None:
    """Also after a checkpoint that was lost."""
    run, whole, env = tmp_path / "run", tmp_path / "whole", {"KERAS_BACKEND": backend}
    ended = run_ranks([KERAS, run, *arguments], 2, env=env)
    assert f"exit with status code {CODE}" in ended.out and "preempted: saved in" in ended.out, ended.text
    assert saved(run)[-len(steps) :] == steps and (LOST in ended.err) is ("lost" in arguments), ended.text
    first, second = (trained(run_ranks([KERAS, folder], 2, env=env).check().out) for folder in (run, whole))
    assert first == second


FORKED = """
import os, signal, sys, time, hvdtrain
from hvdtrain.watch import preemption
with hvdtrain.init("torch"):
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "told", preemption.is_preempted())
"""


def test_a_forked_process_ends_by_sigterm() -> None:
    """As a worker of a data loader is ended."""
    done = run_ranks(["-c", FORKED], 1, launcher="none").check()
    assert "child -15 told False" in done.out, done.text


SLEEPS = """
import os, time, hvdtrain
with hvdtrain.init("torch") as world:
    world.barrier()
    if world.rank:
        os._exit(7)
    time.sleep(60)
"""


def test_after_a_rank_that_failed_no_update_is_waited_for(tmp_path: Path) -> None:
    """With a long grace: the other rank ends at once, all the same."""
    done = launched(tmp_path, "-c", SLEEPS, flags=("--grace=50",))
    assert done.seconds < 45, done.text
    assert done.returncode == 7 and "ended by SIGTERM, without waiting for an update" in done.err, done.text
