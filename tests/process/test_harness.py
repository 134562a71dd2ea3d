"""The harness itself: it ends what hangs, shows where, and sees what is left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from contextlib import nullcontext
from pathlib import Path

import pytest
from harness import REPOSITORY, HarnessError, clean_environment, kill_all, processes_of, run_ranks
from starter_process import TOKEN

HANG = """
import os, signal, subprocess, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def where_it_hangs():
    print("hanging", flush=True)
    threading.Event().wait()
where_it_hangs()
"""
LEAVE = """
import subprocess, sys
code = "import sys; print('here', flush=True); sys.stdin.read()"
child = subprocess.Popen(
    [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
)
child.stdout.readline()
import os
os.dup(child.stdin.fileno())
subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("done", flush=True)
os._exit(0)
"""


def test_result_of_one_process() -> None:
    done = run_ranks(["-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"], 1, launcher="none")
    assert (done.returncode, done.ranks_output, done.ranks_error) == (3, {0: "out\n"}, {0: "err\n"})
    with pytest.raises(AssertionError, match="exit code 3"):
        done.check()


def test_a_hang_is_ended_in_time_and_its_place_is_shown() -> None:
    start = time.monotonic()
    with pytest.raises(HarnessError, match="not done after 2 s") as caught:
        run_ranks(["-c", HANG], 1, launcher="none", timeout_s=2)
    assert "where_it_hangs" in str(caught.value), "py-spy's dump, or faulthandler's"
    assert time.monotonic() - start < 30


def test_processes_left_behind_fail_the_test_and_are_ended() -> None:
    with pytest.raises(HarnessError, match="left behind 1 s after") as caught:
        run_ranks(["-c", LEAVE], 1, launcher="none", grace_s=1)
    assert "sleep 1000" in str(caught.value)


@pytest.mark.parametrize(
    ("launcher", "name"),
    [("horovodrun", "HOROVOD_RANK"), ("mpirun", "OMPI_COMM_WORLD_RANK"), ("torchrun", "RANK")],
)
def test_output_by_rank(launcher: str, name: str) -> None:
    code = (
        f"import os, sys; print('rank', os.environ['{name}']);"
        " print('pinned', os.environ['OMP_NUM_THREADS'], file=sys.stderr)"
    )
    done = run_ranks(["-c", code], 2, launcher=launcher).check()
    assert done.ranks_output == {0: "rank 0", 1: "rank 1"}, done.text
    assert done.ranks_error == {0: "pinned 1", 1: "pinned 1"}


def test_ranks_that_hang_are_all_ended() -> None:
    start = time.monotonic()
    with pytest.raises(HarnessError, match="not done after 4 s") as caught:
        run_ranks(["-c", HANG], 2, launcher="mpirun", timeout_s=4)
    assert str(caught.value).count("where_it_hangs") >= 2
    assert time.monotonic() - start < 40


@pytest.mark.parametrize("hangs", [1, 2])
def test_mpirun_that_hangs_after_its_ranks_is_started_once_more(
    hangs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real mpirun, but for its end: it hangs `hangs` times."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(
        f'#!/bin/sh\n{shutil.which("mpirun")} "$@"\ncode=$?\necho x >> {tmp_path}/starts\n'
        f"[ $(wc -l < {tmp_path}/starts) -gt {hangs} ] || while :; do read -r line < {tmp_path}/nobody; done\n"
        "exit $code\n"
    )
    mpirun.chmod(0o755)
    os.mkfifo(tmp_path / "nobody")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    again = pytest.warns(UserWarning, match="mpirun does not end")
    with again, pytest.raises(HarnessError, match="not done after 6 s") if hangs == 2 else nullcontext():
        done = run_ranks(["-c", "raise SystemExit(3)"], 2, launcher="mpirun", timeout_s=6)
        assert done.returncode == 3, done.text


def test_kill_all_ends_only_its_own() -> None:
    tokens = [uuid.uuid4().hex, uuid.uuid4().hex]
    command = [sys.executable, "-c", "print('up', flush=True); import sys; sys.stdin.read()"]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=clean_environment({TOKEN: token}))
        for token in tokens
    ]
    for child in children:
        with_output = child.stdout
        assert with_output is not None and with_output.readline() == b"up\n"
    kill_all(tokens[0])
    assert children[0].poll() is not None and children[1].poll() is None
    assert not processes_of(tokens[0]) and len(processes_of(tokens[1])) == 1
    for child in children:
        child.communicate()


def test_environment_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("RANK", "1")
    environment = clean_environment({"MINE": "1"})
    assert "SLURM_PROCID" not in environment and "RANK" not in environment
    assert environment["MINE"] == "1" and environment["OMP_NUM_THREADS"] == "1"
    assert environment["PATH"] == os.environ["PATH"]


def test_what_killed_programs_leave_in_their_temporary_folder_goes_with_the_tests(tmp_path: Path) -> None:
    program = "import os, signal, tempfile\nprint(tempfile.mkdtemp(), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    left = Path(run_ranks(["-c", program], 1, launcher="none").out.strip())
    assert left.is_dir() and left.parent.name.startswith("hvdtrain-tests-"), left
    # tests of their own, in a temporary folder that nobody else writes to
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "tests/unit/test_layers.py"],
        cwd=REPOSITORY, env=clean_environment({"TMPDIR": str(tmp_path)}), stdout=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    assert not list(tmp_path.glob("hvdtrain-tests-*"))
