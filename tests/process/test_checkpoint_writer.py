"""Checkpoints that another process writes: what training waits for, and what is left when either process dies."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from checkpoint_steps import synchronous
from harness import PROGRAMS, REPOSITORY, Result, clean_environment, run_ranks
from run_logs import strict

from hvdtrain.record.log import read_run

PROGRAM = PROGRAMS / "core" / "checkpoint_writer.py"


def run(folder: Path, case: str) -> Result:
    return run_ranks([PROGRAM, folder, f"case_{case}"], 1, launcher="none", timeout_s=120)


def steps(folder: Path) -> list[int]:
    return [info.progress.step for info in synchronous(folder).list() if info.ok]


ORDINARY = (
    "training_waits_for_the_third", "each_image_is_of_its_own_moment", "a_killed_one_is_told_at_the_next_save",
    "signals_of_the_job_are_not_its_own", "killed_once_save_has_returned",
)  # fmt: skip
THOROUGH = (
    "a_forked_process_has_its_own", "a_path_is_there_when_it_is_restored", "two_directories_share_it",
    "one_directory_of_two_spellings", "interrupts_lose_nothing", "threads_save_at_a_time",
    "the_program_goes_elsewhere",
)  # fmt: skip


@pytest.mark.parametrize("case", [*ORDINARY, *(pytest.param(case, marks=pytest.mark.thorough) for case in THOROUGH)])
def test_case(case: str, tmp_path: Path) -> None:
    assert "passed" in run(tmp_path, case).check().out


def test_the_last_one_is_waited_for(tmp_path: Path) -> None:
    run(tmp_path, "the_last_one_is_waited_for").check()
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("case", ["an_error_ends_the_program", "a_forked_process_lives_on"])
def test_an_error_that_ends_the_program_waits_too(case: str, tmp_path: Path) -> None:
    ended = run(tmp_path, case)
    assert ended.returncode == 2 and "a rule" in ended.err and steps(tmp_path) == [1]


def test_a_program_that_lost_its_last_one_does_not_end_well(tmp_path: Path) -> None:
    ended = run(tmp_path, "the_last_one_fails")
    assert ended.returncode == 2 and "killed by SIGKILL" in ended.err and "asynchronous=False" in ended.err
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize(
    ("case", "code", "said"),
    [("an_own_error_and_a_failed_write", 1, "ValueError: of its own"), ("an_own_code_and_a_failed_write", 7, "")],
)
def test_what_the_program_ends_with_comes_before_a_failed_write(
    tmp_path: Path, case: str, code: int, said: str
) -> None:
    ended = run(tmp_path, case)
    assert ended.returncode == code and said in ended.err and "killed by SIGKILL" in ended.err


def test_each_save_is_in_the_runs_record(tmp_path: Path) -> None:
    """Which waits for the last one when it ends well; a failed one has no time on disk."""
    assert "passed" in run(tmp_path, "the_record_of_saves").check().out
    events = [event for event in strict(tmp_path / "run" / "events.jsonl") if event["kind"] == "checkpoint"]
    assert [event["step"] for event in events] == [1, 2, 3, 4, 5]
    for event in events:
        assert event["blocked_s"] >= 0 and (event["sealed_s"] is None) == (event["step"] == 3)
    waited = events[1]
    assert waited["sealed_s"] > waited["blocked_s"] and waited["bytes"] == 6_000_000, "training went on"
    assert waited["path"] == "epoch-0000-step-000002"
    assert events[3]["blocked_s"] >= events[3]["sealed_s"] > 0, "a synchronous one"
    told = read_run(tmp_path / "run")["checkpoints"]  # type: ignore[index]
    assert (told["saves"], told["failed"], told["bytes"]) == (5, 1, 6_000_000)
    assert told["blocked_s"] == pytest.approx(sum(event["blocked_s"] for event in events))


def test_a_killed_program_loses_none(tmp_path: Path) -> None:
    """Not by the harness, which ends what a program leaves."""
    done = subprocess.run(
        [sys.executable, PROGRAM, tmp_path, "case_killed_while_it_writes"],
        capture_output=True, text=True, timeout=120, check=False, env=clean_environment(), cwd=REPOSITORY,
    )  # fmt: skip
    found = re.search(r"writer (\d+)", done.stdout)
    assert done.returncode == -9 and found is not None, done.stderr
    pid = int(found[1])
    if psutil.pid_exists(pid):
        assert not psutil.wait_procs([psutil.Process(pid)], timeout=60)[1], "it ends when it is done"
    assert steps(tmp_path) == [1, 2, 3]
