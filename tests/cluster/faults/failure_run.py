"""Runs a fault, and tells what came of it."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from cluster_hosts import Cluster
from failure_job import Job, applied_s, judged
from failure_rows import Fault

BUSY_S = 5.0  # what a busy machine may add to a promise
ENDS_WITHIN_S = 300.0  # resumed ones train to their end, on a machine that may starve them


@dataclass(frozen=True)
class Row:
    """What came of a fault.

    Attributes:
        seconds: from the fault to the end on all hosts; of a job that goes on: the longest time without an update.
        left: processes of the job that still ran 30 s after the launcher had ended, on any host.
        lost: samples that were skipped or repeated, once the training had come to its end.
        wrong: with these, the rates and the weights.
        blamed: by the launcher: a rank and its host, or a host.
        said: the first line that names it.
        text: all that was said.
    """

    name: str
    seconds: float
    code: int
    left: list[str]
    lost: int
    wrong: list[str]
    blamed: str
    said: str
    text: str


def run(fault: Fault, hosts: Cluster, folder: Path, *, resumed: bool = True) -> Row:
    """Lets it happen to a job; where that ends it, starts it once more, from its newest checkpoint."""
    job = Job(hosts, folder, fault.in_program, fault.launcher, fault.hosts, fault.np, fault.pace_s)
    finish = folder / "finish"
    with ExitStack() as stack:
        if fault.around:
            fault.around(job)
        if fault.clear:
            stack.callback(fault.clear, job)
        job.start(*fault.flags)
        if fault.make:
            job.trained(1 if fault.in_program else 10)
            fault.make(job)
        if fault.goes_on:
            job.until((folder / "fault").exists)
            finish.touch()
        code, ended_s, left = job.ended(ENDS_WITHIN_S)
        text, seconds, blamed = job.text, ended_s - job.happened_s, blamed_of(job.attempts())
        if fault.goes_on:
            since = [job.happened_s, *(at for at in applied_s(folder) if at > job.happened_s)]
            seconds = max(later - sooner for sooner, later in pairwise(since))
        if fault.mend:
            fault.mend(job)
        if not fault.goes_on and resumed:
            finish.touch()
            job.start()
            again, _, left_again = job.ended(ENDS_WITHIN_S)
            assert again == 0, f"not resumed\n{text}\n{job.text}"
            left += left_again
        lost, wrong = judged(folder, fault.np) if fault.goes_on or resumed else (0, [])
        return Row(fault.name, seconds, code, left, lost, wrong, blamed, said(text, fault.says), text)


def problems(fault: Fault, row: Row) -> list[str]:
    """What is not as promised."""
    found = [
        (row.code != fault.code, f"exit code {row.code}, not {fault.code}"),
        (row.seconds > fault.within_s + BUSY_S, f"{row.seconds:.1f} s, not {fault.within_s:g}"),
        (bool(row.left), f"left: {row.left}"),
        (bool(row.wrong) or row.lost > 0, f"{row.lost} samples lost: {row.wrong}"),
        (bool(fault.says) and not row.said, f"nothing said like {fault.says!r}"),
    ]
    return [text for holds, text in found if holds]


def blamed_of(attempts: list[dict[str, Any]]) -> str:
    """Whom `launch.json` blames, in the first attempt that failed or lost somebody."""
    for attempt in attempts:
        if failure := attempt.get("failure"):
            return failure["host"] if failure["rank"] is None else f"rank {failure['rank']} on {failure['host']}"
        if lost := attempt.get("lost"):
            return ", ".join(f"rank {its['worker']} on {its['host']}" for its in lost)
    return ""


def said(text: str, pattern: str) -> str:
    """The first line that holds the pattern, without marks of ranks, paths and process ids."""
    if not pattern:
        return ""
    lines = [line for line in text.splitlines() if "; logs in " not in line]
    line = next((line for line in lines if re.search(pattern, line)), "")
    line = re.sub(r"^(\[[\d,]+[^\]]*\](<std\w+>:)?)?\s*(received: )?", "", line)
    return re.sub(r"/\S*/(?=[\w.-]+)", "", line).strip()
