"""Jobs on this machine that end in unusual ways: floods, full disks, paused readers, processes of other users."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable

import psutil
import pytest
from cluster_procfs import command_of
from harness import processes_of
from test_cluster_launch import LAUNCH, TOY, here, launch, launched

from hvdtrain.cluster.doctor import examine
from hvdtrain.cluster.hosts.hosts import parse_hosts
from hvdtrain.cluster.launch.agents import Agents
from hvdtrain.cluster.launch.job import Job, Timeouts


def wait_for(what: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def test_a_rank_that_leaves_a_flood(tmp_path, limit):
    """It once held the agent for ever: read until nothing came, from something that never stops."""
    with launched(tmp_path, "--grace=1", "--quiet", "0:flood:1", np=1) as job:
        assert job.end(20).code == 0
        assert job.left_after(5) == []
    limit("C5", "launch -- sh -c 'yes & exit 0'", mended="ends with 0; the child ends with the job")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_a_signal_while_a_failed_job_ends_is_not_swallowed_by_a_restart(tmp_path, limit, number):
    with launched(tmp_path, "--max-restarts=3", "--grace=2", "0:note:SIGTERM", "0:wait:60", "1:exit:3") as job:
        job.until("[0] got SIGTERM")  # with which the grace begins
        job.process.send_signal(number)
        ended = job.end(20)
    assert "restart 1" not in ended.err and f"ended by {number.name}" in ended.err, ended.text
    assert ended.code == 3, ended.text
    limit("C6", f"{number.name} during the grace of a failed attempt", mended="no restart; the failure's exit code")


def test_the_grace_holds_when_the_launcher_dies(tmp_path, limit):
    """Longer than agents would grant by themselves (5 s)."""
    saved = tmp_path / "saved"
    with launched(tmp_path, "--grace=30", f"0:save_slowly:{saved}", "0:wait:60", np=1) as job:
        job.until("waiting")
        job.process.kill()
        wait_for(saved.exists, 25)
        job.left_after(10)
    limit("C8", "the launcher is killed while ranks need 6 s to save", mended="they get --grace")


# ---- output


def test_characters_that_the_terminal_lacks_do_no_harm(tmp_path, limit):
    ended = launch(tmp_path, "0:bytes:636166c3a90a", "0:say:after", env={"PYTHONIOENCODING": "ascii"}, np=1)
    assert ended.code == 0 and ended.of(0) == ["caf\\xe9", "after"], ended.text
    assert "caf\u00e9" in ended.log(0)
    limit("C9a", "a byte that the launcher's locale cannot print", mended="shown as \\xe9")


def test_a_full_disk_costs_the_output_and_not_the_job(tmp_path, limit):
    with open("/dev/full", "w") as full:
        done = here(*LAUNCH, sys.executable, str(TOY), "*:say:hello", "0:say:more", cwd=tmp_path, stdout=full)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("takes no more (No space left on device)") == 1
    assert (tmp_path / "runs/launch-1/rank-0000.log").read_text() == "hello\nmore\n"
    limit("C9b", "the disk under standard output is full", mended="said once; the job goes on, the logs are whole")


@pytest.mark.parametrize("closed", [pytest.param(">&-", marks=pytest.mark.thorough), "<&- >&- 2>&-"])
def test_closed_descriptors_cost_the_output_and_not_the_job(tmp_path, closed):
    """As daemons and cron start programs: a socket to an agent was descriptor 1, or nothing was."""
    toy = [sys.executable, str(TOY), "*:say:hello", "1:exit:3"]
    done = here("bash", "-c", f'exec "$@" {closed}', "bash", *LAUNCH, *toy, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert (tmp_path / "runs/launch-1/rank-0001.log").read_text() == "hello\n"


def test_a_working_directory_that_is_gone_is_refused(tmp_path, limit):
    gone = tmp_path / "gone"
    gone.mkdir()
    done = here("sh", "-c", 'rmdir "$0"; exec "$@"', str(gone), *LAUNCH, "true", cwd=gone)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    limit("C9c", "the working directory was removed", refused=done.stderr)


def test_a_paused_reader_does_not_keep_a_launcher_that_is_to_end(tmp_path, limit):
    with launched(tmp_path, "--grace=1", "*:wide:20000", "*:wait:60") as job:
        job.until(" 0\n")  # and nothing more is read
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(15) == 143
        assert job.left_after(5) == []
    limit("C9d", "TERM while nobody reads the output", mended="ends within 2 x grace; what is not shown is said")


def test_a_slow_reader_does_not_delay_what_a_failure_needs(tmp_path, limit):
    """Output that nobody has taken is on its way, and the exit behind it: the other ranks must end all the same."""
    many = ("1:sleep:0.5", "1:many:1500", "1:exit:3")
    with launched(tmp_path, "--grace=1", "0:wide:80", "0:wait:60", *many) as job:

        def ranks() -> int:
            return sum(command_of(process).split()[1:2] == [str(TOY)] for process in processes_of(job.token))

        wait_for(lambda: ranks() == 2)
        wait_for(lambda: ranks() == 0, 15)  # and nothing has been read
        ended = job.end(20)
    assert ended.code == 3, ended.text[-2000:]
    limit("C9e", "a rank fails while the reader takes 4 kB/s or nothing", mended="all ranks end within the grace")


# ---- who cannot be ended, who is left


def test_a_process_of_another_user_is_left_and_named(tmp_path, limit):
    """As sudo makes one: the agent may not end it. It once ended the agent, and the guard."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("needs root and setpriv: a launcher that may not end everybody's processes, and another user")
    weak = ["setpriv", "--bounding-set=-kill", "--inh-caps=-kill", "--"]
    script = f"setpriv --reuid=65534 --regid=65534 --clear-groups -- sleep 77 & echo $! > {tmp_path}/pid; sleep 1"
    done = here(*weak, *LAUNCH[:4], "--no-checks", "--grace=1", "-np", "1", "--", "sh", "-c", script, cwd=tmp_path)
    left = psutil.Process(int((tmp_path / "pid").read_text()))
    try:
        assert left.uids().real == 65534, "the test itself: it must have become another user's"
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        assert "still runs, and cannot be ended" in done.stderr and "sleep 77" in done.stderr, done.stderr
    finally:
        left.kill()
    limit("C10", "a rank starts a process as another user (sudo)", mended="named as one that stays; the job ends")


def test_agent_and_guard_killed_together_leave_nothing(tmp_path, limit):
    """The kernel ends the ranks then, but not what a rank that is a shell has started."""
    with launched(tmp_path, "--grace=1", "0:shell:60", np=1) as job:
        job.until("waiting")
        for process in reversed(job.belonging("hvdtrain.cluster.launch.agent")[:2]):
            process.suspend()
        for process in job.belonging("hvdtrain.cluster.launch.agent")[:2]:
            process.kill()
        assert job.end(20).code == 255
        assert job.left_after(5) == []
    limit("C13e", "agent and guard are killed together, and ranks are shells", mended="what they left is ended")


# ---- refusals


@pytest.mark.parametrize("command", ["doctor", "verify"])
def test_an_empty_list_of_hosts_is_refused(command, limit):
    done = here(sys.executable, "-m", "hvdtrain", command, "-H", "")
    assert done.returncode == 2 and "-H must name at least one host" in done.stderr, done.stderr
    limit("C4", '-H "$HOSTS" where HOSTS is not set (launch, doctor, verify)', refused=done.stderr)


def test_a_silence_shorter_than_the_signs_of_life_is_refused(limit):
    done = here(*LAUNCH[:-1], "--lost-after", "0.5", "--", "true")
    assert done.returncode == 2 and "at least 1.5" in done.stderr, done.stderr
    limit("C13d", "--lost-after 0.5", refused=done.stderr.splitlines()[-1])


# ---- the start


def test_names_are_looked_up_at_the_same_time(monkeypatch, limit):
    """One after the other they took 91 s with a dead resolver, and the first agents gave the launcher up."""
    names = [f"h{number}" for number in range(40)]

    def looked_up(name: str) -> bool:
        time.sleep(0.25)
        return True

    monkeypatch.setattr("hvdtrain.cluster.hosts.ssh.is_this_machine", looked_up)
    started = time.monotonic()
    agents = Agents(Job(["true"], parse_hosts(",".join(names)), 40, python="/bin/true"), None)
    seconds = time.monotonic() - started
    agents.close()
    assert seconds < 5, "one after the other it is 10 s"
    limit("C7", "40 names that take 0.25 s each to look up", mended=f"all are reached after {seconds:.1f} s")


def test_a_host_that_cannot_be_examined_is_an_error(tmp_path, limit):
    """Its answer "that failed" was once taken for facts, of which none is wrong."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -v 44000\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    job = Job(["true"], parse_hosts("localhost:1"), 1, python=str(python), timeouts=Timeouts(start_s=30))
    (found,) = examine.examined(job, fast=True).findings
    assert found.severity == "error" and found.hosts == ("localhost",), found
    limit("C2", "a host's start-up files have a ulimit that its probe fails under", refused=found.what)
