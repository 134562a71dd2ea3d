"""Every fault of docs/failures.md: the job ends, or goes on, in time, says why, leaves nothing, and loses no sample."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from cluster_hosts import cluster
from failure_page import PAGE, VARIABLE, note
from failure_rows import FAULTS, Fault
from failure_run import problems, run


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [pytest.param(its, id=its.name, marks=[] if its.quick else [pytest.mark.thorough]) for its in FAULTS]
)
def test_fault(fault: Fault, tmp_path: Path) -> None:
    with cluster(len(fault.hosts.split(","))) as hosts:
        row = run(fault, hosts, tmp_path, resumed=not fault.quick or bool(os.environ.get(VARIABLE)))
    assert problems(fault, row) == [], row.text
    note(row)


def test_the_page_shows_every_fault() -> None:
    page = PAGE.read_text(encoding="utf-8")
    shown = [re.escape(its.what.replace("|", "\\|")) for its in FAULTS]
    assert [what for what in shown if not re.search(rf"^\| {what}[,|]? ", page, re.MULTILINE)] == []
    rows = page.partition("\n## ")[2].count("\n| ")  # after the table that explains the columns
    assert rows == len(FAULTS) + len({its.kind for its in FAULTS}), "run scripts/failures.sh"
