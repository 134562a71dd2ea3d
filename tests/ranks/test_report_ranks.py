"""`hvdtrain report` of real runs, in a real browser."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import PROGRAMS, run_ranks

from hvdtrain.commands.report_trace import HOROVOD

FOUND = {"straggler": "waiting for rank 1", "input": "input bound"}
BROWSER = shutil.which("chromium")
LOOK = PROGRAMS / "torch" / "report_in_browser.py"


def traced(run: Path) -> dict[tuple[int, str], list[tuple[float, float]]]:
    """(begin, end) in microseconds of each rank's phases and updates, as `hvdtrain report --trace` has them."""
    run_ranks(["-m", "hvdtrain", "report", run, "--trace"], 1, launcher="none").check()
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for event in json.loads((run / "trace.json").read_text())["traceEvents"]:
        if event["ph"] == "X" and event["tid"] < 2:
            found.setdefault((event["pid"], event["name"]), []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def test_a_trace_has_every_ranks_phases_and_horovods_own(tmp_path: Path) -> None:
    """In the traced updates the slow rank is in its forward pass while the other waits, in Horovod's timeline, too."""
    program = PROGRAMS / "torch" / "reported.py"
    run_ranks([program, tmp_path, "straggler"], 2, timeout_s=120, env={"HVDTRAIN_TRACE": "5"}).check()
    found = traced(tmp_path)
    for rank in (0, 1):
        assert {name for one, name in found if one == rank} >= {f"update {number}" for number in range(1, 6)}
        assert (rank, "update 6") not in found and len(found[rank, "backward"]) == 5
    pairs = list(zip(found[1, "forward"], found[0, "communication"], strict=True))
    assert all(slow[1] - slow[0] >= 30e3 and waits[1] > slow[1] for slow, waits in pairs), pairs
    # a busy machine may keep the other one from coming first, but not in each of them
    assert any(slow[1] - max(slow[0], waits[0]) > 10e3 for slow, waits in pairs), pairs
    timeline = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    sums = [its for its in timeline if its.get("name") == "ALLREDUCE" and its["ph"] == "B" and its["pid"] >= HOROVOD]
    last = max(end for _, end in found[0, "update 5"])
    assert len(sums) >= 5 and all(0 <= its["ts"] <= last + 1e5 for its in sums)


def test_without_the_variable_nothing_is_traced(tmp_path: Path) -> None:
    run_ranks([PROGRAMS / "torch" / "reported.py", tmp_path, "even"], 2, timeout_s=120).check()
    assert traced(tmp_path) == {} and not (tmp_path / "horovod-timeline.json").exists()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for how in FOUND:
        run_ranks([PROGRAMS / "torch" / "reported.py", folder / how, how], 2, timeout_s=120).check()
    return folder


def reported(*arguments: str | Path) -> str:
    out = Path(arguments[-1])
    run_ranks(["-m", "hvdtrain", "report", *arguments[:-1], "--out", out], 1, launcher="none").check()
    return out.read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("how", FOUND)
def test_what_held_a_run_up_is_named(how: str, runs: Path, tmp_path: Path) -> None:
    page = reported(runs / how, tmp_path / "report.html")
    assert FOUND[how] in page
    assert how == "input" or FOUND["input"] not in page  # while a busy machine makes ranks uneven, too


@pytest.mark.thorough
@pytest.mark.skipif(BROWSER is None, reason="chromium is not installed (apt-get install chromium)")
@pytest.mark.parametrize("which", ["straggler", "all"])
def test_in_a_browser(which: str, runs: Path, tmp_path: Path) -> None:
    """Both themes, wide and narrow: no error, no request, nothing wider than the page, no serious finding of axe."""
    reported(runs if which == "all" else runs / which, tmp_path / "report.html")
    process = subprocess.Popen(
        [sys.executable, LOOK, tmp_path / "report.html", BROWSER or ""], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0 and out.count("fine") == 4, out
