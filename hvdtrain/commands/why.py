"""`hvdtrain why RUN_OR_FILE`: why did it end, or does it not go on? The first cause, in one block.

It reads what a hang has left (RUN/hangs/*.json, or the file that the error named); where there is none, how the run
ended (run.json, events.jsonl), and the pages that ranks leave which were killed (RUN/hangs/rank-*.ring).
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.core.errors import ConfigError, HvdtrainError
from hvdtrain.core.in_step.ring import FOLDER, read_ring
from hvdtrain.runs.log import read_events, read_run, run_status

_READS = "hvdtrain why reads a run's directory, or the file of a hang"
_TOGETHER_S = 2.0  # pages are written once a second


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain why`."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("where", type=Path, metavar="RUN_OR_FILE", help="a run's directory, or the file of a hang")


def run(args: argparse.Namespace) -> int:
    """Prints the cause; returns the exit code: 1 where nothing tells."""
    text = why(args.where)
    print(text or f"{args.where}: nothing tells why: no hang, no rank that was killed, no failed run")
    return 0 if text else 1


def why(where: Path) -> str:
    """Returns the first cause that is known, "" if none is.

    Raises:
        ConfigError: there is no such directory or file, or it holds something else.
    """
    if where.is_file():
        page = read_ring(where)
        return pages_in_words([page]) if page is not None else _hang(where)
    if not where.is_dir():
        raise ConfigError(_READS, f"no {where}")
    run = read_run(where)
    found = sorted([*where.glob(f"{FOLDER}/*.json"), *(where.glob("*.json") if run is None else ())], key=_age)
    attempts = (run or {}).get("attempts") or [{}]
    if found and _age(found[-1]) >= _seconds(attempts[-1].get("started")):
        return _hang(found[-1])
    pages = [page for path in sorted(where.glob(f"{FOLDER}/*.ring")) if (page := read_ring(path)) is not None]
    return "\n".join(filter(None, [_end_of(where, run), pages_in_words(pages)]))


def _age(path: Path) -> float:
    return path.stat().st_mtime


def _seconds(moment: str | None) -> float:
    return datetime.datetime.fromisoformat(moment).timestamp() if moment else 0.0


def _hang(path: Path) -> str:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        error = HvdtrainError(found["rule"], found["received"], found["remedy"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ConfigError(
            "hvdtrain why reads a run's directory, or the file of a hang", f"{path}: {problem!r}"
        ) from None
    return f"{path}, {moment(found['time'])}:\n{error}"


def _end_of(where: Path, run: Mapping[str, Any] | None) -> str:
    """Returns how a run ended, unless it ended well, or goes on."""
    status = run_status(where)
    if run is None or status in (None, "finished"):
        return ""
    last = next((event for event in reversed(read_events(where)) if event.get("kind") in ("step", "epoch")), None)
    came = f"; its last event: {last['kind']} {last.get(last['kind'])}, {moment(last['time'])}" if last else ""
    return f"{where}: {status}{came}" + (f"\n  received: {run['error']}" if run.get("error") else "")


def pages_in_words(pages: Sequence[Mapping[str, Any]]) -> str:
    """Returns what ranks say that were killed, the first to fall silent first; pure."""
    order = sorted(pages, key=lambda page: (page.get("time", 0.0), page.get("updates", 0)))
    lines = []
    for page in order:
        known = [f"{page['updates']} update(s) done", page["in"]]
        known += [f"in phase {page['phase']}"] if page.get("phase") else []
        known += [f"in on_main({page['on_main']})"] if page.get("on_main") else []
        known += [page["line"]] if page.get("line") else []
        who = f"rank {page.get('rank')} (host {page.get('host')}, process {page.get('pid')})"
        lines.append(f"  {who}: last heard of {moment(page.get('time', 0.0))}: {', '.join(known)}")
    if len(order) > 1 and order[1].get("time", 0.0) - order[0].get("time", 0.0) > _TOGETHER_S:
        hosts = len({page.get("host") for page in order})
        doubt = " (by its own host's clock)" if hosts > 1 else ""
        lines.insert(0, f"rank {order[0].get('rank')} fell silent first{doubt}, and is likely the cause")
    elif lines:
        lines.insert(0, "ranks that did not end by themselves (killed, as by SIGKILL or for memory: dmesg tells)")
    return "\n".join(lines)


def moment(seconds: float) -> str:
    """A time of day with its date."""
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")
