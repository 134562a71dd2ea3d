"""`hvdtrain launch` on this machine: real agents and ranks, everything but ssh. Many hosts: test_cluster_train.py."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil
import pytest
from harness import PROGRAMS, clean_environment, kill_all, processes_of
from starter_process import TOKEN

from hvdtrain.__main__ import main

TOY, EARLY = PROGRAMS / "cluster/toy.py", PROGRAMS / "torch/ends_early.py"
TIMEOUT_S = 60
LAUNCH = [sys.executable, "-m", "hvdtrain", "launch", "-np", "2", "--no-checks", "--"]


@dataclass
class Launched:
    """A launcher that runs; `token` marks all that belongs to it."""

    process: subprocess.Popen
    token: str
    folder: Path

    def end(self, timeout_s: float = TIMEOUT_S) -> Ended:
        out, err = self.process.communicate(timeout=timeout_s)
        return Ended(self.process.returncode, out, err, self.folder)

    def until(self, *texts: str) -> None:
        """Read the output until every text was there; a job that does not write them is ended."""
        missing, read = set(texts), list[str]()
        assert self.process.stdout is not None
        late = threading.Timer(TIMEOUT_S, kill_all, (self.token,))
        late.start()
        try:
            for line in self.process.stdout:
                read.append(line)
                missing -= {text for text in missing if text in line}
                if not missing:
                    return
        finally:
            late.cancel()
            late.join()
        raise AssertionError(f"ended without {missing}: {read}")

    def belonging(self, part: str) -> list[psutil.Process]:
        """The processes of this job whose command holds `part`, the oldest first."""
        found = {}
        for process in processes_of(self.token):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                if part in " ".join(process.cmdline()):
                    found[process.create_time(), process.pid] = process
        return [found[key] for key in sorted(found)]

    def left_after(self, grace_s: float) -> list[str]:
        """What still runs when the time is over; returns at once when nothing does."""
        deadline = time.monotonic() + grace_s
        while left := processes_of(self.token):
            if time.monotonic() > deadline:
                return [" ".join(process.cmdline()) for process in left]
            psutil.wait_procs(left, timeout=0.1)
        return []


@dataclass
class Ended:
    code: int
    out: str
    err: str
    folder: Path

    @property
    def text(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"

    def of(self, rank: int) -> list[str]:
        mark = f"[{rank}] "
        return [line.removeprefix(mark) for line in self.out.splitlines() if line.startswith(mark)]

    def log(self, rank: int) -> str:
        return (self.folder / f"runs/launch-1/rank-{rank:04d}.log").read_text()


@contextmanager
def launched(
    folder: Path, *arguments: str, np: int = 2, env: dict[str, str] | None = None, program: Path = TOY
) -> Iterator[Launched]:
    """Start `hvdtrain launch` with `np` ranks of a program; what it leaves is killed and fails the test."""
    flags = [argument for argument in arguments if argument.startswith("-")]
    todo = [argument for argument in arguments if argument not in flags]
    token = uuid.uuid4().hex
    command = [sys.executable, "-m", "hvdtrain", "launch", "-np", str(np), "--no-checks", *flags, "--"]
    process = subprocess.Popen(
        [*command, sys.executable, str(program), *todo], cwd=folder,
        env=clean_environment({**(env or {}), TOKEN: token}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    job = Launched(process, token, folder)
    try:
        yield job
        left = job.left_after(8)
        assert not left, f"left behind: {left}"
    finally:
        kill_all(token)
        process.communicate()


def launch(folder: Path, *arguments: str, np: int = 2, env: dict[str, str] | None = None, program: Path = TOY) -> Ended:
    with launched(folder, *arguments, np=np, env=env, program=program) as job:
        return job.end()


def here(*command: str, cwd: Path | None = None, stdout: IO[str] | int = -1, **env: str) -> subprocess.CompletedProcess:
    """Run a command on this machine to its end."""
    return subprocess.run(
        command, cwd=cwd, env=clean_environment(env), stdout=stdout, stderr=-1, text=True, errors="replace",
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


# ---- what ranks get


def test_ranks_know_their_place_and_their_lines_are_marked_and_logged(tmp_path):
    names = ["RANK", "SIZE", *(f"{of}_{what}" for of in ("LOCAL", "CROSS") for what in ("RANK", "SIZE"))]
    names += ["GLOO_RENDEZVOUS_ADDR", "GLOO_IFACE"]
    ended = launch(tmp_path, *(f"*:show:HOROVOD_{name}" for name in names), "*:partial:no end of line", np=3)
    assert ended.code == 0 and len(ended.out.splitlines()) == 3 * (len(names) + 1), ended.text
    for rank in range(3):
        values = [str(rank), "3", str(rank), "3", "0", "1", "127.0.0.1", "lo"]
        shown = [f"HOROVOD_{name}={value}" for name, value in zip(names, values, strict=True)]
        assert ended.of(rank) == ended.log(rank).splitlines() == [*shown, "no end of line"]
    record = json.loads((tmp_path / "runs/launch-1/launch.json").read_text())
    assert record["np"] == 3 and [attempt["exit_code"] for attempt in record["attempts"]] == [0]


# ---- output


def test_two_jobs_in_one_log_dir_do_not_mix_their_logs(tmp_path):
    first, second = [launch(tmp_path, "--log-dir=logs", f"*:say:{word}") for word in ("first", "second")]
    assert (first.code, second.code) == (0, 0) and "logs has the logs of another job" in second.err, second.text
    assert (tmp_path / "logs/rank-0000.log").read_text() == "first\n"
    assert (tmp_path / "logs/launch-1/rank-0000.log").read_text() == "second\n"
    assert len(json.loads((tmp_path / "logs/launch.json").read_text())["attempts"]) == 1


def test_no_line_is_lost(tmp_path):
    ended = launch(tmp_path, "*:many:20000")
    assert ended.code == 0, ended.err[-2000:]
    for rank in range(2):
        ours = {line for line in (ended.out + ended.err).splitlines() if line.startswith(f"[{rank}] ")}
        assert ours == {f"[{rank}] line {number} of rank {rank}" for number in range(20000)}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("lines", "pause_s"),
    # as much as fits into what is on its way, so that the ranks are gone before; more, so that they must wait
    [(2700, 3.5), (8000, 12)],
)
def test_a_reader_that_pauses_holds_the_job_back_but_does_not_end_it(tmp_path, lines, pause_s):
    """Longer than a silent host is borne, and than the end may take: signs of life must not wait behind output."""
    with launched(tmp_path, "--lost-after=1.5", "--grace=1", f"0:wide:{lines}") as job:
        job.until(" 0\n")
        with pytest.raises(subprocess.TimeoutExpired):
            job.process.wait(timeout=pause_s)
        ended = job.end()
        assert ended.code == 0, ended.err[-2000:]
        assert [int(line) for line in ended.of(0)][-lines // 2 :] == list(range(lines // 2, lines))


def test_a_reader_that_goes_away_ends_the_job(tmp_path):
    with launched(tmp_path, "*:many:60000", "*:sleep:60") as job:
        job.until("line 0 of")
        assert job.process.stdout is not None
        job.process.stdout.close()
        assert job.process.wait(timeout=20) == 141
        job.process.stdout = None


# ---- failures


def test_the_first_failure_is_shown_last_and_by_why_and_ends_all(tmp_path):
    ended = launch(tmp_path, "1:say:before", "1:raise:the cause", "*:sleep:60", np=3)
    assert ended.code == 1, ended.text
    last = ended.err[ended.err.rindex("hvdtrain launch: ") :]
    assert last.startswith("hvdtrain launch: rank 1 on localhost failed first"), ended.text
    assert "exit code 1" in last and "  | ValueError: the cause\n" in last and last.endswith("rank-0001.log\n")
    named = ended.err.split("logs in ")[1].splitlines()[0]
    for where in (named, f"{named}/launch.json"):
        why = here(sys.executable, "-m", "hvdtrain", "why", str(tmp_path / where))
        assert why.returncode == 0 and "attempt 1 ended with exit code 1\nrank 1 on localhost failed" in why.stdout
        assert "  | ValueError: the cause\n" in why.stdout and why.stdout.endswith("rank-0001.log\n"), why.stdout


def test_a_rank_that_a_signal_ends(tmp_path):
    ended = launch(tmp_path, "1:kill:SIGKILL", "*:sleep:60")
    assert ended.code == 137, ended.text
    assert "ended by SIGKILL" in ended.err


def test_a_stopped_rank_ends_the_job(tmp_path):
    started = time.monotonic()
    ended = launch(tmp_path, "--stopped-after=1", "1:kill:SIGSTOP", "*:sleep:60")
    assert ended.code == 128 + signal.SIGSTOP, ended.text
    assert "rank 1 on localhost" in ended.err and "SIGSTOP" in ended.err
    assert time.monotonic() - started < 15


def test_a_command_that_is_not_there(tmp_path):
    done = here(*LAUNCH, "./no-such-program", cwd=tmp_path)
    assert done.returncode == 127 and "no program ./no-such-program\n" in done.stderr, done.stderr
    done = here(*LAUNCH, "pythn", cwd=tmp_path)
    assert "no program pythn on this host's PATH; did you mean python?\n" in done.stderr, done.stderr


# ---- the end


def test_control_c(tmp_path):
    """Every rank gets it; only rank 0's traceback is shown."""
    with launched(tmp_path, "0:end_at:SIGINT", "*:wait:60") as job:
        job.until("[0] waiting", "[1] waiting")
        job.process.send_signal(signal.SIGTSTP)  # Ctrl-Z must not make the hosts think that the launcher is dead
        job.process.send_signal(signal.SIGINT)
        ended = job.end(15)
        assert ended.code == 130, ended.text
        assert "[0] ending at SIGINT" in ended.out.splitlines(), ended.text
        assert "KeyboardInterrupt" not in ended.err and "KeyboardInterrupt" in ended.log(1), ended.text


def test_sigterm_reaches_the_ranks_and_others_are_passed_on(tmp_path):
    with launched(tmp_path, "*:note:SIGUSR1", "*:end_at:SIGTERM", "*:wait:60") as job:
        job.until("[0] waiting", "[1] waiting")
        job.process.send_signal(signal.SIGUSR1)
        job.until("[0] got SIGUSR1", "[1] got SIGUSR1")
        job.process.send_signal(signal.SIGTERM)
        ended = job.end(15)
        assert ended.code == 143, ended.text
        assert {"[0] ending at SIGTERM", "[1] ending at SIGTERM"} <= set(ended.out.splitlines()), ended.text


def test_a_signal_that_is_passed_on_waits_until_ranks_handle_it(tmp_path):
    """A rank that imports its framework would only die by it, and --max-restarts would start the job again."""
    imported, over = tmp_path / "imported", tmp_path / "over"
    todo = [f"*:until:{imported}", "*:note:SIGUSR1", f"*:until:{over}", "*:say:end"]
    with launched(tmp_path, "--max-restarts=1", *todo) as job:
        job.until("[0] waiting", "[1] waiting")
        job.process.send_signal(signal.SIGUSR1)
        assert job.process.stderr is not None
        assert "is passed on" in next(its for its in job.process.stderr if "SIGUSR1" in its)
        imported.touch()
        job.until("[0] got SIGUSR1", "[1] got SIGUSR1")
        over.touch()
        ended = job.end()
    assert ended.code == 0 and {"[0] end", "[1] end"} <= set(ended.out.splitlines()), ended.text
    assert "restart" not in ended.err, ended.text


@pytest.mark.parametrize(("how", "code", "by"), [("fails", 3, "launcher"), ("dies", 138, "somebody else")])
def test_a_job_that_was_told_to_end_is_not_started_again(tmp_path, how, code, by):
    """The launcher remembers that it passed the signal on. What somebody else sends to one rank is that rank's end."""
    with launched(tmp_path, "--max-restarts=1", f"*:when_told:{how}", "*:wait:60") as job:
        job.until("[0] waiting", "[1] waiting")
        if by == "launcher":
            job.process.send_signal(signal.SIGUSR1)
        else:
            job.belonging("toy.py")[-1].send_signal(signal.SIGUSR1)
            job.until("[0] waiting", "[1] waiting")
            job.process.send_signal(signal.SIGUSR1)
        ended = job.end()
    assert ended.code == code, ended.text
    assert "not started again: the job got SIGUSR1" in ended.err, ended.text
    assert ("restart 1 of 1" in ended.err) is (by == "somebody else"), ended.text


def test_ranks_that_ignore_the_end_are_killed_after_the_grace(tmp_path):
    started = time.monotonic()
    ended = launch(tmp_path, "--grace=1", "*:ignore:SIGTERM", "0:sleep:0.5", "0:exit:3", "*:sleep:60")
    assert ended.code == 3, ended.text
    assert 1.5 <= time.monotonic() - started < 12


def test_what_ranks_leave_behind_ends_with_the_job(tmp_path):
    """Processes that left their session and their parent, after ranks that ended well."""
    ended = launch(tmp_path, "--grace=1", "*:orphan:stubborn", "*:say:done")
    assert ended.code == 0 and len(ended.out.splitlines()) == 2, ended.text


@pytest.mark.parametrize("who", ["launcher", "agent", pytest.param("guard", marks=pytest.mark.thorough)])
def test_whoever_is_killed_nothing_is_left(tmp_path, who):
    with launched(tmp_path, "*:orphan:willing", "*:wait:60") as job:
        job.until("[0] waiting", "[1] waiting")
        guard, agent, *_ = job.belonging("hvdtrain.cluster.launch.agent")
        found: dict[str, subprocess.Popen[str] | psutil.Process]
        found = {"launcher": job.process, "guard": guard, "agent": agent}
        found[who].kill()
        ended = job.end(20)
        assert ended.code == (-9 if who == "launcher" else 255), ended.text
        assert job.left_after(8) == []


@pytest.mark.parametrize("who", ["agent", pytest.param("guard", marks=pytest.mark.thorough)])
def test_guard_and_agent_wake_each_other(tmp_path, who):
    """A stopped one could not end the ranks."""
    with launched(tmp_path, "*:wait:60") as job:
        job.until("[0] waiting", "[1] waiting")
        guard, agent, *_ = job.belonging("hvdtrain.cluster.launch.agent")
        stopped = {"guard": guard, "agent": agent}[who]
        stopped.suspend()
        job.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert job.end(15).code == 143
        assert time.monotonic() - started < 6, "it had to be killed"


# ---- restarts


def test_restarts_until_it_works(tmp_path):
    shown = [f"*:show:{name}" for name in ("HVDTRAIN_RESTART", "HVDTRAIN_JOB")]
    ended = launch(tmp_path, "--max-restarts=3", *shown, "1:fail_first:1", "0:sleep:0.3")
    assert ended.code == 0, ended.text
    lines = ended.of(1)
    assert lines[::2] == [f"HVDTRAIN_RESTART={number}" for number in (0, 1)]
    assert len(set(lines[1::2])) == 1 and lines[1] != "HVDTRAIN_JOB=None"
    record = json.loads((tmp_path / "runs/launch-1/launch.json").read_text())
    assert [attempt["exit_code"] for attempt in record["attempts"]] == [1, 0]
    assert "restart 1 of 3" in ended.err and ended.log(1).count("RuntimeError: not yet") == 1


def test_restarts_after_progress_do_not_count(tmp_path):
    ended = launch(tmp_path, "--max-restarts=1", "1:updates:10,20,30,30", "1:fail_first:3")
    assert ended.code == 0, ended.text
    assert "restart after progress (to update 30)" in ended.err and "restart 1 of 1" not in ended.err
    record = json.loads((tmp_path / "runs/launch-1/launch.json").read_text())
    assert [attempt["updates"] for attempt in record["attempts"]] == [10, 20, 30, 30]


def test_a_rank_that_ends_well_while_others_go_on_is_blamed(tmp_path):
    ended = launch(tmp_path, program=EARLY)
    assert ended.code == 1, ended.text
    assert "rank 1 on localhost failed first" in ended.err, ended.text
    record = json.loads((tmp_path / "runs/launch-1/launch.json").read_text())
    assert [attempt["updates"] for attempt in record["attempts"]] == [13], "also those of the last second"
    assert (
        "ended with exit code 0 while others continued; rank 0 on localhost, which lacked it: exit code 1" in ended.err
    )


# ---- refusals, and what would run


def test_a_refused_job_leaves_no_folder(tmp_path):
    done = here(*LAUNCH[:-1], "--network", "198.51.100.0/24", "--", "true", cwd=tmp_path)
    assert done.returncode == 2 and "every host needs an address in" in done.stderr, done.stderr
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-np", "2"], "needs a command"),
        (["-H", "a;reboot:2", "--", "true"], "'a;reboot:2'"),
        (["-H", "localhost:2", "--hostfile", "hosts", "--", "true"], "give one of them"),
        (["-x", "NOT_SET_ANYWHERE", "--", "true"], "NOT_SET_ANYWHERE"),
        (["--no-checks", "-x", "HOROVOD_GLOO_IFACE=ens99", "--", "true"], "ens99; it has lo"),
        (["-np", "1000000000", "--", "true"], "-np 1,000,000,000"),
    ],
)
def test_refusals(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_dry_run_tells_and_starts_nothing(tmp_path):
    with launched(tmp_path, "--dry-run", "-xMY_TOKEN=hunter2", "-xPLAIN=yes", "0:say:never") as job:
        ended = job.end()
    assert ended.code == 0, ended.text
    for text in ("0:say:never", "lo 127.0.0.1", "PLAIN=yes",
                 "HOROVOD_GLOO_IFACE=lo", "MY_TOKEN=(not shown)"):  # fmt: skip
        assert text in ended.out, ended.text
    assert "hunter2" not in ended.text and not (tmp_path / "runs").exists()
