"""The harness ends what hangs, shows where, and sees what is left behind; forked ranks are what a cold start makes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from harness import HarnessError, Result, run_ranks

# by which it may be forked, and a cold start does not wait for PyTorch
TORCH = "if 0: import torch\n"
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


@pytest.mark.parametrize(("launcher", "np"), [("forked", 2), pytest.param("mpirun", 2, marks=pytest.mark.thorough)])
def test_a_hang_is_ended_in_time_and_its_place_is_shown(launcher: str, np: int) -> None:
    run_ranks(["-c", TORCH], np)  # else the time may be over before the ranks have been forked
    with pytest.raises(HarnessError, match="not done after 4 s") as caught:
        run_ranks(["-c", TORCH + HANG], np, launcher=launcher, timeout_s=4)
    assert str(caught.value).count("where_it_hangs") >= np, "py-spy's dump, or faulthandler's"


@pytest.mark.parametrize("launcher", ["forked", "none"])
def test_processes_left_behind_fail_the_test_and_are_ended(launcher: str) -> None:
    with pytest.raises(HarnessError, match="left behind 0.5 s after") as caught:
        run_ranks(["-c", TORCH + LEAVE], 1, launcher=launcher, grace_s=0.5)
    assert "sleep 1000" in str(caught.value)


# ---- forked ranks

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
    "killed": "import os; print('before', flush=True); os.kill(os.getpid(), 9)",
    "rank 1 alone": "import os, signal\nif os.environ['HOROVOD_RANK'] == '1': raise SystemExit(3)\nsignal.pause()",
}


def words(result: Result) -> list[dict[int, list[str]]]:
    """What ranks wrote, without what the shell of horovodrun writes, and the details of a fault."""
    another = re.compile(r"\s|Terminated|Current thread|Extension modules|$")
    return [
        {rank: [line for line in text.splitlines() if not another.match(line)] for rank, text in its.items()}
        for its in ({0: "", 1: ""} | result.ranks_output, {0: "", 1: ""} | result.ranks_error)
    ]


@pytest.mark.parametrize(("how", "np"), [(["-m", "facts"], 1), (["facts.py"], 2)])
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


@pytest.mark.skipif("COVERAGE_PROCESS_START" in os.environ, reason="processes that are measured are not forked")
def test_it_is_forked_indeed() -> None:
    code = f"{TORCH}import sys; print('starter_process' in sys.modules)"
    ways: list[dict[str, Any]] = [{}, {"launcher": "none"}, {"env": {"OMP_NUM_THREADS": "2"}}]  # read at an import
    assert [run_ranks(["-c", code], 1, **way).check().out for way in ways] == ["True\n", "False\n", "False\n"]


def test_ranks_and_runs_draw_numbers_of_their_own() -> None:
    runs = [run_ranks(["-c", DRAWS], 2).check().ranks_output for _ in range(2)]
    numbers = [number for run in runs for text in run.values() for number in text.split()]
    assert len(set(numbers)) == len(numbers) == 12


@pytest.mark.parametrize("end", ENDS)
def test_an_end_is_that_of_a_cold_start(end: str) -> None:
    np, launcher = (2, "horovodrun") if end == "rank 1 alone" else (1, "none")
    cold, forked = (run_ranks(["-c", TORCH + ENDS[end]], np, launcher=its) for its in (launcher, "forked"))
    assert forked.returncode == cold.returncode and words(forked) == words(cold), cold.text + forked.text
