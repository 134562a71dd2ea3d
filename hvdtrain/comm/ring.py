"""A rank's last sign of life: a page of a mapped file, which is there however the process ends.

The rank's watch thread writes its facts once a second. The rank itself writes its counts at each change of place. So
the page shows the progress of a rank that was killed or stopped. The rank removes its page at a normal end. In a run's
directory the page of a failed rank stays, with its error, until another attempt replaces it.

    RUN_DIR/hangs/rank-1.ring       where a run directory is known, else
    TMP/hvdtrain-UID/JOB.rank-1.ring
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.comm.lines import raised_at
from hvdtrain.core import variables

FOLDER = "hangs"  # in a run directory
NOWHERE, UPDATE, MEETING = range(3)
_PLACES = ("in no collective operation", "in an update", "in a meeting of the ranks")
_PAGE = 4096
_SLOTS = (64, 2080)  # of two texts: one of them is whole
_MAGIC = int.from_bytes(b"hvdring1", "little")
_OLD_S = 24 * 3600.0
_ERROR = 600  # characters of it that are kept
# what ranks fail with because another one has: hvdtrain's, and where the program calls Horovod itself
AFTERMATH = ("RanksLost", "MainRankError", "HorovodInternalError")


class Ring:
    """The page of this rank, which its constructor writes to disk in place of an earlier one; raises `OSError` if it
    cannot."""

    def __init__(self, path: Path) -> None:
        self.path, self._pid, self._turn = path, os.getpid(), 0
        new = path.with_name(f".{path.name}.{os.getpid()}")
        with open(new, "w+b") as file:
            file.write(bytes(_PAGE))  # on disk: a page that finds no room when it is touched would end the process
            file.flush()
            self._page = mmap.mmap(file.fileno(), _PAGE)
        os.replace(new, path)
        self._counts = memoryview(self._page)[:64].cast("q")
        self._facts: Mapping[str, Any] = {}
        self._words: Mapping[str, Any] = {}
        self._writing = threading.RLock()
        self._counts[0] = _MAGIC

    def note(self, place: int, updates: int, meetings: int, steps: int) -> None:
        """Notes a change of place; by the thread that trains."""
        counts = self._counts
        counts[1], counts[2], counts[3], counts[4] = place, updates, meetings, steps

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Writes what else is known of the rank."""
        room = _SLOTS[1] - _SLOTS[0] - 1
        with self._writing:
            self._facts, known = facts, {"time": time.time(), **facts, **self._words}
            if variables.LAUNCH in os.environ:
                known[variables.LAUNCH] = os.environ[variables.LAUNCH]
            text = json.dumps(known).encode()
            for most in (150, 40, 20):  # a character may take 12 bytes
                if len(text) > room:
                    short = {
                        name: value if len(str(value)) < most else str(value)[:most] for name, value in known.items()
                    }
                    text = json.dumps(short).encode()
            start = _SLOTS[self._turn]
            self._turn = 1 - self._turn
            self._page[start : start + room + 1] = text[:room].ljust(room + 1, b"\0")

    def tell_last(self, words: Mapping[str, Any]) -> None:
        """Writes what the rank fails with, beside what is known of it: what it fails with after that is hidden."""
        with self._writing:
            self._words = self._words or words
            self.tell(self._facts)

    def remove(self) -> None:
        """Ends the page; nothing to do in a forked process, whose parent still has it."""
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):
            self.path.unlink()
        with contextlib.suppress(OSError):  # the last one takes the folder, where nothing else was left in it
            self.path.parent.rmdir()


def place_of(run_dir: Path | None, token: str, rank: int) -> Path | None:
    """Returns where the page of a rank belongs, by the run's directory or the job's token, which the path does not
    give away; None where this user has no folder of his own for it."""
    if run_dir is not None:
        return run_dir / FOLDER / f"rank-{rank}.ring"
    folder = own_folder()
    job = hashlib.sha256(token.encode()).hexdigest()[:12]
    return None if folder is None else folder / f"{job}.rank-{rank}.ring"


def own_folder() -> Path | None:
    """Makes this user's folder in the temporary directory and returns it; None if another user owns that name."""
    folder = Path(tempfile.gettempdir()) / f"hvdtrain-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
        if facts.st_uid == os.getuid() and not facts.st_mode & 0o022 and folder.is_dir() and not folder.is_symlink():
            return folder
    return None


def open_ring(run_dir: Path | None, token: str, rank: int) -> Ring | None:
    """Returns this rank's page, None where none can be had: to train without is better than not to train."""
    with contextlib.suppress(OSError):
        path = place_of(run_dir, token, rank)
        if path is not None and (run_dir is None or run_dir.is_dir()):
            path.parent.mkdir(exist_ok=True)
            for old in path.parent.glob("*.ring") if run_dir is None else ():
                with contextlib.suppress(OSError):
                    if time.time() - old.stat().st_mtime > _OLD_S:
                        old.unlink()
            return Ring(path)
    return None


def last_words(ring: Ring | None, run_dir: Path | None, rank: int, error: BaseException, *, ends: bool) -> Ring | None:
    """Writes a rank's error into its page in the run's directory, and never raises; without a run's directory it
    writes nothing and, if the process `ends` now, removes the page. Returns the page that a normal end must remove;
    None if the process `ends` now."""
    with contextlib.suppress(Exception):
        if ring is None and ends and run_dir is not None:
            ring = open_ring(run_dir, "", rank)
        if ring is not None and ring.path.parent.name == FOLDER:
            ring.tell_last({"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), **_words_of(error)})
        elif ring is not None and ends:
            ring.remove()
    return None if ends else ring


def _words_of(error: BaseException) -> dict[str, Any]:
    text, aftermath, cause = type(error).__name__, False, error
    with contextlib.suppress(Exception):  # the text of an error is its class's to make
        text = f"{text}: {error}"
    for _ in range(20):  # a chain is as long as the program makes it
        aftermath = aftermath or type(cause).__name__ in AFTERMATH
        cause = cause.__cause__ or cause.__context__ or cause
    return {"failed": time.time(), "error": text[:_ERROR], "aftermath": aftermath, "at": raised_at(error)}


def forget(run_dir: Path, rank: int, size: int, *, folder: bool) -> None:
    """Removes the page that an earlier attempt has left of this rank; on rank 0 also those of ranks beyond `size`,
    and, where no rank is about to make its own, the `folder` if that was the last one."""
    pages = run_dir / FOLDER
    with contextlib.suppress(OSError):
        (pages / f"rank-{rank}.ring").unlink()
    for path in pages.glob("rank-*.ring") if rank == 0 else ():
        with contextlib.suppress(OSError, ValueError):
            if int(path.stem.removeprefix("rank-")) >= size:
                path.unlink()
    if folder:
        with contextlib.suppress(OSError):
            pages.rmdir()


def forget_launch(launch: str) -> None:
    """Removes the pages in the temporary directory that ranks of one attempt of a job have left on this host."""
    folder = own_folder()
    for path in folder.glob("*.ring") if folder is not None else ():
        if (read_ring(path) or {}).get(variables.LAUNCH) == launch:
            with contextlib.suppress(OSError):
                path.unlink()
    with contextlib.suppress(OSError):
        if folder is not None:
            folder.rmdir()


def read_ring(path: Path) -> dict[str, Any] | None:
    """Returns what a page holds, None where there is none: the newest text, with the counts of the last change."""
    try:
        page = path.read_bytes()
    except OSError:
        return None
    counts = memoryview(page[:64]).cast("q") if len(page) == _PAGE else [0]
    if counts[0] != _MAGIC:
        return None
    texts = []
    for start in _SLOTS:
        with contextlib.suppress(ValueError):
            texts.append(json.loads(page[start : start + _SLOTS[1] - _SLOTS[0] - 1].rstrip(b"\0")))
    newest: dict[str, Any] = max(texts, key=lambda text: text["time"], default={})
    place = _PLACES[counts[1]] if 0 <= counts[1] < len(_PLACES) else ""
    return {**newest, "in": place, "updates": counts[2], "meetings": counts[3], "steps": counts[4]}
