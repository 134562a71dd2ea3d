"""The output of a job: lines marked with their rank, a log a rank, and the first failed rank's error last."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

from hvdtrain.cluster.hosts.hosts import Host, Slot
from hvdtrain.cluster.launch.failures import Failure
from hvdtrain.core.errors import ConfigError
from hvdtrain.record.folder import next_folder

_LOOK_S = 0.1
LONGEST_LINE = 1000
RECORD = "launch.json"  # of a job's attempts, in the folder of its logs
_FRAME = re.compile(r'  File "([^"]*)", line \d+')
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", f"{Path(__file__).parents[2]}/")
_SHOWN_LINES = 40
_COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def report(text: str, within_s: float = float("inf")) -> None:
    """Prints a line of the launcher's own; `within_s`: how long to wait for a reader that pauses.

    While ranks run nothing may wait for one for long.
    """
    until_s = time.monotonic() + within_s
    with contextlib.suppress(OSError):  # the reader is gone
        put(sys.stderr, f"hvdtrain launch: {text}", lambda: time.monotonic() < until_s)


def put(stream: TextIO, line: str, worth: Callable[[], bool]) -> bool:
    """Writes a line to a stream whose reader may pause, as long as that is `worth` waiting; returns True if all of it
    was taken. Raises OSError if the reader is gone, or the disk is full.

    Characters that the stream's encoding lacks are written as "\\xe9".
    """
    data = memoryview(f"{line}\n".encode(stream.encoding or "utf-8", "backslashreplace"))
    descriptor = stream.fileno()
    while data:
        if select.select([], [descriptor], [], _LOOK_S)[1]:
            with contextlib.suppress(BlockingIOError):
                data = data[os.write(descriptor, data[: select.PIPE_BUF]) :]  # that much has room in a pipe
        elif not worth():
            return False
    return True


class Logs:
    """A folder with a log a rank, both streams in the order they came, and `launch.json`."""

    def __init__(self, folder: Path | None) -> None:
        """Makes the folder: the given one, or the next free runs/launch-N. If the given one has the logs of another
        job, which may still run, it is the next free launch-N within it.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            self.folder = folder or next_folder(Path("runs"), "launch")
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                (self.folder / RECORD).touch(exist_ok=False)  # two launchers that start together see only one of them
            except FileExistsError:
                self.folder = next_folder(self.folder, "launch")
                report(f"{folder} has the logs of another job; those of this job are in {self.folder}")
                (self.folder / RECORD).touch()
        except OSError as error:
            received = f"{error.filename}: {error.strerror}"
            raise ConfigError(
                "the ranks' logs need a folder to write to", received, "name one: --log-dir DIR"
            ) from error
        self._files: dict[int, IO[str]] = {}
        self._broken = False
        self._attempts = 0

    def write(self, rank: int, line: str) -> None:
        """Adds a line. A disk that is full costs the logs, not the job."""
        if self._broken:
            return
        try:
            if rank not in self._files:
                # line by line, so that a log is up to date while the job runs
                self._files[rank] = log_of(self.folder, rank).open("a", encoding="utf-8", buffering=1)
            self._files[rank].write(line + "\n")
        except OSError as error:
            self._broken = True
            report(f"no more logs: {log_of(self.folder, rank)}: {error.strerror}")

    def record(self, facts: dict[str, Any]) -> None:
        """Rewrites `launch.json`."""
        try:
            partial = self.folder / f"{RECORD}.partial"
            partial.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            os.replace(partial, self.folder / RECORD)
            self._attempts = len(facts["attempts"])
        except OSError as error:
            report(f"no {RECORD}: {self.folder}: {error.strerror}")

    def close(self) -> None:
        """Closes the files. Without any, and without an attempt, nothing was started: the folder goes."""
        if not self._files and not self._attempts:
            with contextlib.suppress(OSError):
                (self.folder / RECORD).unlink()
                self.folder.rmdir()
        for file in self._files.values():
            try:
                file.close()
            except OSError as error:
                report(f"a log is not complete: {file.name}: {error.strerror}")
        self._files.clear()


class Display:
    """Marks lines with their rank, and with its host where there are several."""

    def __init__(self, slots: Sequence[Slot], logs: Logs, *, quiet: bool, with_hosts: bool | None = None) -> None:
        self._with_hosts = len({slot.host for slot in slots}) > 1 if with_hosts is None else with_hosts
        self._marks: dict[int, str] = {}
        for slot in slots:
            self.add(slot.rank, slot.host)
        self._logs, self._quiet, self._errors_of_rank_0_only = logs, quiet, False
        self._until_s = float("inf")
        self._mute: set[str] = set()  # streams that take no more
        colours = not os.environ.get("NO_COLOR")  # https://no-color.org
        self._coloured = {name for name in ("stdout", "stderr") if colours and getattr(sys, name).isatty()}

    def add(self, rank: int, host: Host) -> None:
        """Notes where a rank is."""
        self._marks[rank] = f"[{rank} {host.address}] " if self._with_hosts else f"[{rank}] "

    def interrupt(self, within_s: float) -> None:
        """Shows errors of rank 0 only (after a Ctrl-C each rank has its traceback), and waits no longer than
        `within_s` for a reader that pauses."""
        self._errors_of_rank_0_only = True
        self._until_s = min(self._until_s, time.monotonic() + within_s)

    def line(self, rank: int, stream: str, line: str) -> None:
        """Logs a line, and shows it, unless the disk is full; raises OSError if the reader of the output is gone."""
        self._logs.write(rank, line)
        if stream in self._mute or (rank != 0 and (self._quiet or self._errors_of_rank_0_only and stream == "stderr")):
            return
        mark = "" if self._quiet else self._marks[rank]
        if mark and stream in self._coloured:
            mark = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{mark}\x1b[0m"
        try:
            target = sys.stdout if stream == "stdout" else sys.stderr
            shown = put(target, f"{mark}{line}", lambda: time.monotonic() < self._until_s)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._stop(stream, f"takes no more ({error.strerror})")
        else:
            if not shown:
                self._stop(stream, "is not read")

    def _stop(self, stream: str, why: str) -> None:
        self._mute.add(stream)
        report(f"the launcher's {stream} {why}: the rest is in {self._logs.folder} only", within_s=1.0)


def log_of(folder: Path, rank: int) -> Path:
    """Returns the log of one rank."""
    return folder / f"rank-{rank:04d}.log"


def failure_block(failure: Failure, folder: Path) -> str:
    """Returns what is shown last when a job failed: the first failure, its last lines, and where the logs are."""
    host = "host " if failure.rank is None else ""
    lines = [f"{host}{failure.who} failed first, after {failure.after_s:.1f} s: {failure.why}"]
    if failure.lines:
        lines.append("  its last lines:")
    for line in without_libraries(failure.lines)[-_SHOWN_LINES:]:
        more = f" ... ({len(line)} characters, see the log)" if len(line) > LONGEST_LINE else ""
        lines.append(f"  | {line[:LONGEST_LINE]}{more}")
    if failure.remedy:
        lines.append(f"  fix: {failure.remedy}")
    lines.append(f"  logs: {log_of(folder, failure.rank) if failure.rank is not None else folder}")
    return "\n".join(lines)


def without_libraries(lines: Sequence[str]) -> list[str]:
    """Returns a rank's lines without the frames of libraries and of hvdtrain that stand below a user's frame in a
    traceback; with their number in the place of each group."""
    kept: list[str] = []
    hidden, below_user, hides = 0, False, False
    for line in lines:
        frame = _FRAME.match(line)
        if frame is not None:
            library = any(part in frame[1] for part in _LIBRARIES)
            below_user, hides = below_user or not library, below_user and library
            hidden += hides
        elif not line.startswith("    "):
            below_user = hides = False
        if not hides:
            if hidden:
                kept.append(f"  ... {hidden} frame(s) of libraries, see the log")
            kept.append(line)
            hidden = 0
    return kept
