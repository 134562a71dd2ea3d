"""Runs a file of Horovod's own tests in this rank; those of test/integration start ranks themselves.

usage: suite.py FOLDER FILE [TEST ...]

What became of each test, but for those that are named, goes to FOLDER/RANK.json: passed, failed or skipped, and why.
A failure is no exit code: the launcher would end the other ranks for it.
Horovod is started once: to end and start it again over Gloo, as some suites do after each test, can abort it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest


class Outcomes:
    def __init__(self, left_out: list[str]) -> None:
        self._left_out = left_out
        self.found: dict[str, tuple[str, str]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        names = [item.name for item in items]
        assert set(self._left_out) <= set(names), self._left_out
        items[:] = [item for item in items if item.name not in self._left_out]

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.rpartition("::")[2]
        if report.failed:
            self.found[name] = (
                "failed",
                f"{str(report.longrepr)[-2000:]}\n{report.capstdout[-4000:]}{report.capstderr[-2000:]}",
            )
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            self.found.setdefault(name, ("skipped", str(reason)))
        elif report.when == "call":
            self.found.setdefault(name, ("passed", ""))


def main(folder: Path, file: Path, left_out: list[str]) -> None:
    os.chdir(file.parent)
    if "torch" in file.name and file.parent.name == "parallel":
        import horovod.torch as hvd

        hvd.shutdown = lambda: None
    outcomes = Outcomes(left_out)
    arguments = [
        "-q",
        "--no-header",
        "--rootdir=.",
        "--confcutdir=..",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        file.name,
    ]
    pytest.main(arguments, plugins=[outcomes])
    rank = os.environ.get("HOROVOD_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
    (folder / f"{rank}.json").write_text(json.dumps(outcomes.found))
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
