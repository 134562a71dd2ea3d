"""Forked ranks are what a cold start would have made, and no fault of theirs is hidden."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from harness import HarnessError, Result, clean_environment, run_ranks
from test_harness import HANG, LEAVE

# by which it may be forked, and a cold start does not wait for PyTorch
TORCH = "if 0: import torch\n"
# what a program may ask about itself; of variables whose values differ from run to run, the names
FACTS = f"""{TORCH}
import json, os, signal, sys, tempfile, threading
varies = ("PORT", "TOKEN", "RUN", "ADDR")
environ = {{name: "" if name.endswith(varies) else value for name, value in os.environ.items()}}
print(json.dumps({{
    "environ": environ, "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "folder": tempfile.gettempdir(),
    "main": sorted(name for name in vars(sys.modules["__main__"]) if name.startswith("__")), "name": __name__,
    "file": globals().get("__file__"), "warnings": sys.warnoptions, "threads": threading.active_count(),
    "handlers": [str(signal.getsignal(its)) for its in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "session": os.getsid(0) == os.getpid(),
    "ours": sorted(name for name in sys.modules if name.startswith(("hvdtrain", "horovod"))),
    "files": sorted(os.listdir("/proc/self/fd"))[:3], "unbuffered": sys.stdout.write_through,
}}))
"""
DRAWS = "import random, numpy, torch\nprint(random.random(), numpy.random.rand(), float(torch.rand(())))"
ENDS = {
    "exits": "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)",
    "raises": "print('before'); raise ValueError('on purpose')",
    "segmentation fault": "import ctypes; print('before', flush=True); ctypes.string_at(0)",
    "killed": "import os; print('before', flush=True); os.kill(os.getpid(), 9)",
    "at exit": "import atexit; atexit.register(print, 'the last word')",
    "rank 1 alone": "import os, signal\nif os.environ['HOROVOD_RANK'] == '1': raise SystemExit(3)\nsignal.pause()",
}


def words(result: Result) -> list[dict[int, list[str]]]:
    """What ranks wrote, without what the shell of horovodrun writes, and the details of a fault."""
    another = re.compile(r"\s|Terminated|Current thread|Extension modules|$")
    return [
        {rank: [line for line in text.splitlines() if not another.match(line)] for rank, text in its.items()}
        for its in ({0: "", 1: ""} | result.ranks_output, {0: "", 1: ""} | result.ranks_error)
    ]


@pytest.mark.parametrize(
    ("how", "np"), [(["-c", FACTS], 1), (["-m", "facts"], 1), (["facts.py"], 2), (["-W", "ignore", "facts.py"], 1)]
)
def test_a_program_finds_what_it_would_find_after_a_cold_start(np: int, how: list[str], tmp_path: Path) -> None:
    (tmp_path / "facts.py").write_text(FACTS)
    env = {"HVDTRAIN_X": "1", "MICRO": "2"}
    cold, forked = (
        run_ranks([*how, "--flag"], np, launcher=launcher, env=env, cwd=tmp_path).check()
        for launcher in ("none" if np == 1 else "horovodrun", "forked")
    )
    for rank in range(np):
        wanted, found = (json.loads(its.ranks_output[rank]) for its in (cold, forked))
        if np > 1:  # ranks of horovodrun are in the session of a process between
            wanted.pop("session"), found.pop("session")
        assert found == wanted
        assert "starter_process" not in forked.err, forked.text


def test_it_is_forked_indeed() -> None:
    code = f"{TORCH}import sys; print('starter_process' in sys.modules)"
    launchers = ("forked", "none")
    assert [run_ranks(["-c", code], 1, launcher=its).check().out for its in launchers] == ["True\n", "False\n"]
    other = run_ranks(["-c", code], 1, env={"OMP_NUM_THREADS": "2"}).check()
    assert other.out == "False\n", "libraries read this variable while they are imported"


def test_ranks_and_runs_draw_numbers_of_their_own() -> None:
    runs = [run_ranks(["-c", DRAWS], 2).check().ranks_output for _ in range(2)]
    numbers = [number for run in runs for text in run.values() for number in text.split()]
    assert len(set(numbers)) == len(numbers) == 12


@pytest.mark.parametrize("end", ENDS)
def test_an_end_is_that_of_a_cold_start(end: str) -> None:
    np, launcher = (2, "horovodrun") if end == "rank 1 alone" else (1, "none")
    cold, forked = (run_ranks(["-c", TORCH + ENDS[end]], np, launcher=its) for its in (launcher, "forked"))
    assert forked.returncode == cold.returncode and words(forked) == words(cold), cold.text + forked.text


def test_a_hang_is_ended_in_time_and_its_place_is_shown() -> None:
    with pytest.raises(HarnessError, match="not done after 5 s") as caught:
        run_ranks(["-c", TORCH + HANG], 2, timeout_s=5)
    assert str(caught.value).count("where_it_hangs") >= 2


def test_processes_left_behind_fail_the_test_and_are_ended() -> None:
    with pytest.raises(HarnessError, match="left behind 1 s after") as caught:
        run_ranks(["-c", TORCH + LEAVE], 1, grace_s=1)
    assert "sleep 1000" in str(caught.value)


def test_nothing_outlives_tests_that_are_killed(tmp_path: Path) -> None:
    fifo = tmp_path / "up"
    os.mkfifo(fifo)
    program = f"{TORCH}import os\nwith open({str(fifo)!r}, 'w') as up:\n    up.write(f'{{os.getpid()}}\\n')\n{HANG}"
    code = f"from harness import run_ranks\nrun_ranks(['-c', {program!r}], 2)"
    tests = subprocess.Popen([sys.executable, "-c", code], env=clean_environment())
    ranks: list[psutil.Process] = []
    while len(ranks) < 2:
        ranks += [psutil.Process(int(pid)) for pid in fifo.read_text().split()]
    above = {its for rank in ranks for its in rank.parents()} - {*psutil.Process().parents(), psutil.Process()}
    tests.kill()
    tests.wait()
    _, alive = psutil.wait_procs([*ranks, *above], timeout=30)
    assert len(above) == 3 and not alive, "tests, the process that forks, and the launcher"
