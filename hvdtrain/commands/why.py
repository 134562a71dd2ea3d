"""`hvdtrain why RUN_OR_FILE`: prints the first cause why a run ended or hangs, in one block.

It reads the report of a hang, or of ranks out of step (RUN/hangs/*.json, or the file that the error named). Without
one it reads how the run ended (run.json, events.jsonl), and the pages of ranks that failed or ended silently
(RUN/hangs/rank-*.ring). Of a folder that `hvdtrain launch` has made (runs/launch-N) it reads launch.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.comm.arrival import names_of
from hvdtrain.comm.ring import AFTERMATH, FOLDER, read_ring
from hvdtrain.core.errors import PREEMPTED_CODE, ConfigError, HvdtrainError
from hvdtrain.record.log import read_events, read_run, run_status

_READS = "hvdtrain why needs a run's directory, a launcher's folder of logs, or the file of a hang"
_FIX = "hvdtrain why runs/launch-1 (the folder that the launcher printed as logs:), or a --run-dir"
_TOGETHER_S = 2.0  # pages are written once a second
_SILENT = (
    "ranks that ended without a message: killed (by SIGKILL, or because memory ran out: see dmesg), or ended by"
    " os._exit, or by a crash of native code"
)
_GOES_ON = "the last report of each rank"
_TOLD = 4  # errors
_PREEMPTED = "the job was preempted"
_UNKNOWN = "the signal (SIGTERM or SIGUSR1) and the save, if any, are not recorded here; see the output of the ranks"
_GOT = re.compile(r"^hvdtrain: (rank \d+ got SIG\w+): ", re.M)
_SAVED = re.compile(r"^hvdtrain: (preempted: .*)", re.M)
Page = Mapping[str, Any]  # see `read_ring`, `last_words`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain why`."""
    parser.description = __doc__
    what = "a run's directory, a launcher's folder of logs, or the file of a hang"
    parser.add_argument("where", type=Path, metavar="RUN_OR_FILE", help=what)


def run(args: argparse.Namespace) -> int:
    """Prints the cause; returns the exit code: 1 if the cause is unknown."""
    text = why(args.where)
    print(text or f"{args.where}: no cause is recorded: no hang, no rank that ended without a message, no failed run")
    return 0 if text and _UNKNOWN not in text else 1


def why(where: Path) -> str:
    """Returns the first cause that is known, or ""; raises ConfigError for a path that is no run."""
    from hvdtrain.cluster.launch.output import RECORD

    launched = _launched(where.parent if where.name == RECORD else where, RECORD)
    if where.is_file() and where.name != RECORD:
        page = read_ring(where)
        return _hang(where) if page is None else errors_in_words([page]) if "error" in page else pages_in_words([page])
    run = read_run(where)
    if run is None and launched is not None:
        return launched
    if not where.is_dir():
        raise ConfigError(_READS, f"no {where}", _FIX)
    others = () if run is not None else (path for path in where.glob("*.json") if path.name != RECORD)
    found = sorted([*where.glob(f"{FOLDER}/*.json"), *others], key=_age)
    attempts = (run or {}).get("attempts") or [{}]
    pages = [page for path in sorted(where.glob(f"{FOLDER}/*.ring")) if (page := read_ring(path)) is not None]
    words = [page for page in pages if "error" in page]
    if found and _age(found[-1]) >= _seconds(attempts[-1].get("started")):
        before = [page for page in words if not page["aftermath"] and page["failed"] < _age(found[-1])]
        return "\n".join([*([errors_in_words(before)] if before else []), _hang(found[-1])])
    silent = [page for page in pages if "error" not in page]
    error = str((run or {}).get("error") or "")
    if error and not any(page["rank"] == 0 and error.startswith(page["error"]) for page in words):
        ended = next((event["time"] for event in reversed(read_events(where)) if event.get("kind") == "end"), 0.0)
        words.append({"rank": 0, "error": error, "aftermath": error.startswith(AFTERMATH), "failed": ended})
    head = _GOES_ON if run_status(where) == "running" else _SILENT
    return "\n".join(filter(None, [_end_of(where, run), _causes(words, silent, head)])) or launched or ""


def _launched(folder: Path, record: str) -> str | None:
    """Returns what a launcher has recorded of its job's last attempt, "" if it ended well; None: no launcher has."""
    from hvdtrain.cluster.launch.failures import Failure
    from hvdtrain.cluster.launch.output import failure_block

    path = folder / record
    if not path.is_file():
        return None
    try:
        attempts = json.loads(path.read_text(encoding="utf-8") or "{}").get("attempts")
        if not attempts:
            return f"{folder}: no attempt has ended: the job runs, or its launcher was killed; see its logs"
        code, failure = attempts[-1]["exit_code"], attempts[-1]["failure"]
        head = f"{folder}: attempt {len(attempts)} ended with exit code {code}"
        if failure is None:
            ended = _preempted(folder) if code == PREEMPTED_CODE else "a signal ended the launcher"
            return f"{head}: {ended}" if code else ""
        lines, after_s = tuple(failure.get("lines", ())), failure.get("after_s", 0.0)
        failed = Failure(failure["rank"], failure["host"], code, failure["why"], lines, after_s)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ConfigError(f"{record} must be one that hvdtrain launch wrote", f"{path}: {problem!r}") from None
    return f"{head}\n{failure_block(failed, folder)}"


def _preempted(folder: Path) -> str:
    """Returns the lines of the ranks' logs on the signal that ended them, and on their last save."""
    logs = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("rank-*.log"))]
    got = [found[-1] for log in logs if (found := _GOT.findall(log))]
    saved = [found[-1] for log in logs if (found := _SAVED.findall(log))]
    return f"{_PREEMPTED}: {'; '.join(dict.fromkeys([*(got or [_UNKNOWN]), *saved]))}"


def _age(path: Path) -> float:
    return path.stat().st_mtime


def _seconds(moment: str | None) -> float:
    return datetime.datetime.fromisoformat(moment).timestamp() if moment else 0.0


def _hang(path: Path) -> str:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        error = HvdtrainError(found["rule"], found["received"], found["remedy"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ConfigError(_READS, f"{path} is no file of a hang: {problem!r}", _FIX) from None
    return f"{path}, {moment(found['time'])}:\n{error}"


def _end_of(where: Path, run: Mapping[str, Any] | None) -> str:
    """Returns how a run ended and its last event; "" if it ended well or there is no run."""
    status = run_status(where)
    if run is None or status in (None, "finished"):
        return ""
    last = next((event for event in reversed(read_events(where)) if event.get("kind") in ("step", "epoch")), None)
    came = f"; its last event: {last['kind']} {last.get(last['kind'])}, {moment(last['time'])}" if last else ""
    preempted = f"\n  {_PREEMPTED}: {_UNKNOWN}" if status == "preempted" else ""
    return f"{where}: {'no end is recorded' if status == 'killed' else status}{came}{preempted}"


def _causes(words: Sequence[Page], silent: Sequence[Page], head: str) -> str:
    """Returns the first of errors and of ranks that have ended without a word, and then its consequences; pure."""
    own = [page for page in words if not page["aftermath"]]
    first_s = min((page["failed"] for page in own), default=float("inf"))
    before = [page for page in silent if page.get("time", 0.0) < first_s - _TOGETHER_S]
    after = [page.get("rank", 0) for page in silent if page not in before]
    parts = [pages_in_words(before, head), errors_in_words(own or ([] if before else words))]
    lost = next((page for page in words if page["aftermath"]), None)
    if lost is not None and (own or before):
        parts.append(f"  after it: rank {lost['rank']}: {lost['error'].splitlines()[0]}")
    if after:
        parts.append(f"  after it: {names_of(after)} ended without a message: a launcher ends the others")
    return "\n".join(filter(None, parts))


def errors_in_words(pages: Sequence[Page]) -> str:
    """Returns the errors of ranks that failed, in their order, each once; pure."""
    first: dict[str, Page] = {}
    for page in sorted(pages, key=lambda page: (page["failed"], page["rank"])):
        first.setdefault(page["error"], page)
    lines: list[str] = []
    for error, page in list(first.items())[:_TOLD]:
        who = f"{_name(page)}, {moment(page['failed'])}: " if "pid" in page else ""
        lines.append(("            then " if lines else "  received: ") + who + error.replace("\n", "\n" + " " * 12))
        if page.get("at"):
            lines.append(f"              at {page['at']}")
    return "\n".join(lines)


def _name(page: Page) -> str:
    return f"rank {page.get('rank')} (host {page.get('host')}, process {page.get('pid')})"


def pages_in_words(pages: Sequence[Page], head: str = _SILENT) -> str:
    """Returns the last reports of ranks that have ended without a word, the first to fall silent first; pure."""
    order = sorted(pages, key=lambda page: (page.get("time", 0.0), page.get("updates", 0)))
    lines = []
    for page in order:
        known = [f"{page['steps']} update(s) done", page["in"]]
        known += [f"in phase {page['phase']}"] if page.get("phase") else []
        known += [f"in on_main({page['on_main']})"] if page.get("on_main") else []
        known += [page["line"]] if page.get("line") else []
        lines.append(f"  {_name(page)}: last report {moment(page.get('time', 0.0))}: {', '.join(known)}")
    if len(order) > 1 and order[1].get("time", 0.0) - order[0].get("time", 0.0) > _TOGETHER_S:
        hosts = len({page.get("host") for page in order})
        doubt = " (by its own host's clock)" if hosts > 1 else ""
        lines.insert(0, f"rank {order[0].get('rank')} fell silent first{doubt}, and is likely the cause")
    elif lines:
        lines.insert(0, head)
    return "\n".join(lines)


def moment(seconds: float) -> str:
    """Returns a date with the time of day."""
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")
