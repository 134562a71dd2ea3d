"""Jobs that take turns: one runs, the others stand still; nothing is left when they end, well or not."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest
from harness import clean_environment

from hvdtrain.bench.turns.turns import Arm, InterleavedJobs
from hvdtrain.core.errors import HvdtrainError

PROGRAM = """
import sys, threading, time
from hvdtrain.comm.turns import orders
ticks = 0
def tick():
    global ticks
    while True:
        ticks += 1
        time.sleep(0.001)
threading.Thread(target=tick, daemon=True).start()
if "dies" in sys.argv:
    raise SystemExit("died before it was ready")
for order, connection in orders(int(sys.argv[1])):
    if "dies-later" in sys.argv:
        raise SystemExit("died in its turn")
    before = ticks
    while ticks < before + order["ticks"]:
        time.sleep(0.001)
    connection.send({"rank": int(sys.argv[1]), "ticks": ticks})
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, *words]


def two_ranks() -> list[str]:
    return ["/bin/sh", "-c", '"$0" "$@" 1 & exec "$0" "$@" 0', *command()]


def arm_pids(arm: Arm) -> list[int]:
    infos = [Path(f"/proc/self/fdinfo/{descriptor}").read_text() for descriptor in arm.processes.values()]
    return [int(info.partition("Pid:")[2].split()[0]) for info in infos]


def alive(pid: int) -> bool:
    """Whether a process runs; one whose new parent has not yet taken its exit code does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stopped(pid: int) -> bool:
    """Whether a process stands still, or does so within a second: a signal takes a moment."""
    deadline = time.monotonic() + 1
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        if time.monotonic() > deadline:
            return False
    return True


def test_one_at_a_time() -> None:
    with InterleavedJobs(clean_environment()) as jobs:
        jobs.start("first", command("0"), 1)
        jobs.start("second", two_ranks(), 2)
        arms = jobs._arms
        before = jobs.turn("first", ticks=5)[0]["ticks"]
        answers = jobs.turn("second", ticks=50)  # meanwhile the first one's thread must stand still
        assert [answer["rank"] for answer in answers] == [0, 1]
        pids = [pid for arm in arms.values() for pid in arm_pids(arm)]
        assert len(pids) == 3 and all(stopped(pid) for pid in pids)
        after = jobs.turn("first", ticks=5)[0]["ticks"]
        assert after - before < 45, "it ticked on while the other one had its turn of 50 ticks"
    assert not [pid for pid in pids if alive(pid)]


@pytest.mark.parametrize("word", ["dies", "dies-later"])
def test_a_job_that_dies_says_why(word: str) -> None:
    def run() -> None:
        with InterleavedJobs(clean_environment()) as jobs:
            jobs.start("arm", command("0", word), 1)
            jobs.turn("arm", ticks=1)

    with pytest.raises(HvdtrainError, match="died"):
        run()
