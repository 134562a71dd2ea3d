"""`hvdtrain report` of real runs, in a real browser."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import PROGRAMS, run_ranks

HOW = ("straggler", "input")
BROWSER = shutil.which("chromium")
LOOK = PROGRAMS / "torch" / "report_in_browser.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for how in HOW:
        run_ranks([PROGRAMS / "torch" / "reported.py", folder / how, how], 2, timeout_s=120).check()
    return folder


def reported(*arguments: str | Path) -> str:
    out = Path(arguments[-1])
    run_ranks(["-m", "hvdtrain", "report", *arguments[:-1], "--out", out], 1, launcher="none").check()
    return out.read_text()


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
