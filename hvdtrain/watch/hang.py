"""Who lets the others wait, and is it hung? Pure: reports of ranks in, a verdict out.

A rank that waits in a collective operation for longer than the hang time, for one that is in none, has its job ended,
unless that rank may take longer: ten times as long before its first update, in `world.on_main`, while it compiles,
saves, loads or evaluates, while its main thread goes round in circles (see `looks`), and at the end of the program; for
ever while it moves on to functions that are new, and while a debugger is in any rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.comm.arrival import names_of
from hvdtrain.core import variables
from hvdtrain.core.errors import ReplicaError
from hvdtrain.watch.looks import CIRCLES, MOVING
from hvdtrain.watch.meeting import END, State, described

LONGER = 10.0
STOPPED = 2 / 3  # of a rank that is seen to be: Horovod's Gloo gives up after 30 s, and does not say for whom
_LONG_PHASES = ("checkpoint", "evaluation")
_SHOWN_FRAMES = 8

# What a rank says of itself, as JSON: rank, host, pid; at: the State of the collective operation that it is in, or
# None; updates, steps, meetings, on_main, phase, last; idle_s, awake_s; movement, task, debugger; stacks.
Report = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """A judgement of `judge`, or of `watch` ("out of step")."""

    kind: str = ""  # "hung", "out of step": end the job; "moving", "debugged": leave it alone; "": nothing is wrong
    ranks: list[int] = field(default_factory=list)  # that do not come, or that are debugged
    waiting: list[int] = field(default_factory=list)  # for them


def judge(reports: Mapping[int, Report], silent: Mapping[int, Report], hang_s: float) -> Verdict:
    """Returns which ranks are hung, by reports of those that answered and what is known of silent ones; pure."""
    waits = {rank: report for rank, report in reports.items() if report["at"] is not None}
    awake_s = min((report["awake_s"] for report in reports.values()), default=0.0)
    late: list[int] = []
    absent: dict[int, list[int]] = {}
    for rank, report in {**reports, **silent}.items():
        if report.get("at") is not None and rank in reports:
            continue
        waiting = [other for other, its in waits.items() if rank in silent or _misses(its["at"], report)]
        here_s = report["idle_s"] if rank in reports else awake_s
        waited = min([awake_s, here_s, max((waits[w]["idle_s"] for w in waiting), default=0.0)])
        limit_s = hang_s * patience(report)
        if waiting and all(waits[other]["at"]["kind"] == END for other in waiting):
            limit_s = max(limit_s, hang_s * LONGER)
        if waited >= min(limit_s, hang_s):
            absent[rank] = waiting
            if waited >= limit_s:
                late.append(rank)
    debugged = [rank for rank, report in {**reports, **silent}.items() if report.get("debugger")]
    if debugged and absent:
        return Verdict("debugged", debugged)
    if late:
        return Verdict("hung", late, sorted({other for rank in late for other in absent[rank]}))
    moving = [rank for rank in absent if patience(reports.get(rank, {})) == float("inf")]
    return Verdict("moving", moving, sorted(waits)) if moving else Verdict()


def _misses(at: State, other: Report) -> bool:
    """Returns True if a rank waits for one that has not reached its operation, or whose on_main() call still runs."""
    if at.get("agreed"):
        return bool(other["on_main"])
    return bool(other["updates" if at["kind"] == "update" else "meetings"] < at["number"])


def patience(report: Report) -> float:
    """Returns how many times longer than others a rank may take; pure."""
    if report.get("gone") or str(report.get("state", "")).startswith("T"):
        return STOPPED
    if report.get("movement") == MOVING:
        return float("inf")
    # what is not known of a silent rank does not count for it, unless nothing is, for it may be out of reach
    slow = (
        report.get("steps", 1) == 0
        or report.get("on_main")
        or report.get("phase") in _LONG_PHASES
        or report.get("task")
        or report.get("movement") == CIRCLES
        or report.get("reached") is False
    )
    return LONGER if slow else 1.0


# -- texts ---------------------------------------------------------------------------------------------------------
def hung(
    verdict: Verdict, reports: Mapping[int, Report], silent: Mapping[int, Report], hang_s: float, bundle: str
) -> ReplicaError:
    """Returns the error that names the missing ranks and their places, the waiting ranks, and the fix; pure."""
    known = {**reports, **silent}
    lines = [line for rank in verdict.ranks[:4] for line in who_does_not_come(rank, known[rank])]
    if len(verdict.ranks) > 4:
        lines.append(f"nor have {names_of(verdict.ranks[4:])}")
    places: dict[str, list[int]] = {}
    for rank in verdict.waiting:
        places.setdefault(described(reports[rank]["at"]), []).append(rank)
    waited = max((reports[rank]["idle_s"] for rank in verdict.waiting), default=hang_s)
    for place, ranks in places.items():
        lines.append(f"{names_of(ranks)} wait{'s' * (len(ranks) == 1)} {place}")
    lines.append(f"for {waited:.0f} s; all ranks' stacks: {bundle}" if bundle else f"for {waited:.0f} s")
    first = known[verdict.ranks[0]]
    at = reports[verdict.waiting[0]]["at"] if verdict.waiting else {}
    return ReplicaError(
        f"ranks must not keep others waiting in a collective operation ({variables.HANG_S}={hang_s:g})",
        "\n".join(lines),
        _remedy(first, at, verdict.ranks[0] in silent),
        shared=True,
        code=44,
    )


def who_does_not_come(rank: int, report: Report) -> list[str]:
    """Returns what is known of a rank that does not come, a line each; pure."""
    who = f"rank {rank}"
    if report.get("host"):
        who += f" (host {report['host']}, process {report.get('pid')})"
    silent = "at" not in report
    done = [f"{report['steps']} update(s) done"] if "steps" in report else []
    if report.get("phase"):
        done.append(f"in phase {report['phase']}")
    if report.get("task"):
        done.append(f"where it {report['task']}")
    if report.get("on_main"):
        done.append(f"in on_main({report['on_main']})")
    if not silent:
        frames = report["stacks"][0]["frames"] if report.get("stacks") else []
        frames = ([frame for frame in frames if frame["user"]] or frames)[-_SHOWN_FRAMES:]
        where = _line_of(frames[-1]) if frames else "?"
        words = {MOVING: "running at", CIRCLES: "looping at"}.get(report.get("movement", ""), "at")
        head = f"{who} has not reached the collective; it is {words} {where}"
        if report.get("failed"):
            head = (
                f"{who} has failed ({report['failed']}, see its output) and its process does not end, {words} {where}"
            )
        return [f"{head} ({', '.join(done)})", *(f"  {_line_of(frame, within=True)}" for frame in frames[:-1])]
    state = report.get("state")
    lines = [f"{who} has not reached the collective and does not answer" + f": process state {state}" * bool(state)]
    if report.get("gone"):
        lines = [f"{who} has not reached the collective: its process is gone"]
    if report.get("wchan"):
        lines[0] += f", in the kernel's {report['wchan']}"
    if done:
        lines.append(f"  last report: {', '.join(done)}, {report.get('in') or ''}".rstrip(", "))
    if report.get("line"):
        lines.append(f"  {report['line']}")
    return lines + [f"  {line}" for line in report.get("native", "").splitlines()[:_SHOWN_FRAMES]]


def _line_of(frame: Mapping[str, Any], *, within: bool = False) -> str:
    place = f"{os.path.basename(frame['file'])}:{frame['line']}" + (f", in {frame['function']}" if within else "")
    return f"{place}: {frame['text']}" if frame["text"] else place


def _remedy(report: Report, at: Mapping[str, Any], silent: bool) -> str:
    slow = f"if the rank is only slow: world.on_main(...) for work of rank 0, or {variables.HANG_S}=600 (0: never)"
    if silent:
        cause = "a process that was stopped, a host that is gone, or native code that holds Python's lock"
        if str(report.get("state", "")).startswith("T"):
            cause = f"it was stopped (SIGSTOP, or a debugger): kill -CONT {report.get('pid', 'PID')}"
        return f"{cause};\n{slow}"
    if report.get("failed"):
        return "a thread keeps the failed process: threading.Thread(..., daemon=True), or end it in a finally clause"
    found = "an endless loop, a lock that is never released, or data that does not arrive: look at that line"
    if at and at["kind"] not in ("update", END, "on_main"):
        found = f"call {at['kind']} on every rank, as what is collective; or {found}"
    return f"{found};\na hang cannot be distinguished from slow work for certain;\n{slow}"


def notes(verdict: Verdict, known: Mapping[int, Report], hang_s: float) -> str:
    """Returns the note that rank 0 prints if a rank is late but the job continues; pure."""
    if verdict.kind == "debugged":
        why = "; ".join(f"rank {rank}: {known[rank]['debugger']}" for rank in verdict.ranks)
        return f"hvdtrain: ranks wait for longer than {hang_s:g} s, and are not ended: {why}"
    where = "\n  ".join(who_does_not_come(rank, known[rank])[0] for rank in verdict.ranks)
    late = f"{names_of(verdict.waiting)} wait{'s' * (len(verdict.waiting) == 1)} for longer than {hang_s:g} s"
    return f"hvdtrain: {late}; the job continues, because the late ranks still move:\n  {where}"
