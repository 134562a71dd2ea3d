"""A run as a Chrome trace, for ui.perfetto.dev or chrome://tracing; pure but for reading the files.

The format: "Trace Event Format" (Chromium), as Horovod's own timeline is written; times are in microseconds.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hvdtrain.record.clock import PHASES, TIMELINE, Mark
from hvdtrain.record.log import read_events

Event = dict[str, Any]
_PHASES, _UPDATES, _LOG, _SAVES = range(4)  # rows of a rank
_ROWS = {_PHASES: "phases", _UPDATES: "updates", _LOG: "log: phases of several updates", _SAVES: "checkpoints"}
HOROVOD = 1_000_000  # Horovod numbers its tensors from 1, as processes: here after the ranks
_EPOCH = "start_time_since_epoch_in_micros"


def trace(path: Path) -> dict[str, Any]:
    """Returns the trace: a process a rank with the phases of its traced updates, and what the log has of the others.

    Where updates were traced, Horovod's timeline is a process a tensor beside them. Ranks of several hosts stand as
    their clocks do.
    """
    timeline = _read_timeline(path / TIMELINE)
    found = [*_from_log(read_events(path)), *_from_timeline(timeline)]
    begin = min((event["ts"] for event in found), default=0)
    for event in found:
        event["ts"] -= begin
    ranks = {event["pid"] for event in found if event["pid"] < HOROVOD}
    names = [_name("process_name", f"rank {rank}", rank) for rank in sorted(ranks)]
    names += [_name("thread_name", name, rank, row) for rank in sorted(ranks) for row, name in _ROWS.items()]
    names += [
        _name("process_name", f"Horovod: {event['args']['name']}", HOROVOD + event["pid"])
        for event in timeline
        if event.get("name") == "process_name" and "name" in event["args"]
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *found]}


def _name(kind: str, name: str, process: int, row: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": {"name": name}}


def _slice(name: str, begin_s: float, end_s: float, rank: int, row: int, **more: Any) -> Event:
    # whole microseconds: slices that overlap by the rounding of a length are left out by Perfetto
    begin, end = round(1e6 * begin_s), round(1e6 * end_s)
    whole = {"ph": "X", "name": name, "ts": begin, "dur": max(end - begin, 0)}
    return {**whole, "pid": rank, "tid": row, "args": more}


def _from_log(events: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
    told_until = 0.0
    for event in events:
        at, kind = float(event.get("time", 0.0)), event.get("kind")
        more = {name: value for name, value in event.items() if name not in ("time", "kind", "config", "ranks")}
        if kind == "marks":
            for rank, marks in enumerate(event["ranks"]):
                if marks and all(map(_is_mark, marks)):
                    yield from _of_marks(marks, rank)
        elif kind == "step":  # rank 0's phases of some updates, one after the other
            seconds = {phase: float(event["seconds"].get(phase, 0.0)) for phase in PHASES}
            begin = max(at - sum(seconds.values()), told_until)
            for phase, taken in seconds.items():
                if taken > 0:
                    end = min(begin + taken, at)
                    yield _slice(phase, begin, end, 0, _LOG, **more)
                    begin = max(begin, end)
            told_until = max(told_until, at)
        elif kind == "checkpoint":
            yield _slice("checkpoint", at - float(event.get("sealed_s") or 0.0), at, 0, _SAVES, **more)
        else:
            yield {"ph": "i", "s": "g", "name": str(kind), "ts": round(1e6 * at), "pid": 0, "tid": _LOG, "args": more}


def _is_mark(mark: Any) -> bool:
    return isinstance(mark, list) and len(mark) == 2 and isinstance(mark[0], float) and isinstance(mark[1], str)


def _of_marks(marks: Sequence[Mark], rank: int) -> Iterator[Event]:
    """Each phase until the next begins; each update since the one before ended, or the first phase began."""
    phases = [(at, name) for at, name in marks if name in PHASES]
    for (begin, phase), (end, _) in pairwise([*phases, (marks[-1][0], "")] if phases else []):
        yield _slice(phase, begin, end, rank, _PHASES)
    ends = [mark for mark in marks if mark[1] not in PHASES]
    for (begin, _), (end, update) in pairwise([marks[0], *ends] if ends else []):
        yield _slice(update, begin, end, rank, _UPDATES)


def _read_timeline(path: Path) -> list[Event]:
    """Returns Horovod's timeline, an event a line, without damaged lines: in a job that was ended, the last one."""
    found: list[Event] = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else ():
        with contextlib.suppress(ValueError):
            found += json.loads(f"[{line.strip().lstrip('[').rstrip('],')}]")
    return [event for event in found if isinstance(event, dict) and _is_horovods(event)]


def _is_horovods(event: Event) -> bool:
    numbers = [event.get(name, 0) for name in ("pid", "ts", "dur")]
    return event.get("ph") in ("B", "E", "X", "M", "i") and all(type(number) is int for number in numbers)


def _from_timeline(timeline: Sequence[Event]) -> Iterator[Event]:
    since = 0.0
    for event in timeline:
        since = event.get("args", {}).get(_EPOCH, since)
        if "ts" in event:
            yield {**event, "ts": since + event["ts"], "pid": HOROVOD + event["pid"], "tid": 0}
