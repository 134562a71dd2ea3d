"""One folder of checkpoints: how one is written, which are there, which go.

A checkpoint is a directory, written under a temporary name, forced to disk and renamed: it is there whole or not at
all. Its manifest has the size and SHA-256 of every file, and a digest of itself. Older ones are deleted only after a
newer one is complete.

    checkpoints/epoch-0003-step-000042/manifest.json  model.keras  random.npz

A process of its own may do it (`hvdtrain.checkpoint.writer`): nothing here needs the ranks, or a framework.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import math
import os
import re
import shutil
import socket
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hvdtrain.checkpoint.checkpoint_files import (
    LAYOUT,
    MANIFEST,
    Sealed,
    read_manifest,
    seal,
    sync_directory,
    write_manifest,
)
from hvdtrain.checkpoint.parts import Progress
from hvdtrain.checkpoint.staging import StateFile
from hvdtrain.core.errors import CheckpointError, HvdtrainError
from hvdtrain.core.version import __version__
from hvdtrain.record.log_files import plain

_NAME = re.compile(r"epoch-(\d+)-step-(\d+)(?:\.(\d+))?")
_UNFINISHED = re.compile(r"\.(?:writing|deleting)-(?P<host>.+)-(?P<pid>\d+)-[^-]+")
_ABANDONED_S = 24 * 3600.0
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)  # the last: NFS, of what is only read


class Lock:
    """A directory that this process has taken, until the object or the process ends; nothing is written there.

    Raises:
        CheckpointError: another process has it.
    """

    def __init__(self, directory: Path, *, shared: bool = False) -> None:
        self._descriptor = descriptor = os.open(directory, os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor).atexit = False  # at the end the kernel does
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                "a checkpoint directory belongs to one training at a time: this one must not save there",
                f"{directory} is in use by another process",
                "give another directory, or end that training first",
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                raise

    def holds(self, directory: Path) -> bool:
        """Returns True if `directory` is still the one that was locked; it may have been moved away."""
        return os.path.samestat(os.fstat(self._descriptor), directory.stat())


def is_taken(directory: Path) -> bool:
    """Returns True if a process has taken a directory."""
    try:
        Lock(directory, shared=True)
    except CheckpointError:
        return True
    except OSError:  # it does not exist yet
        pass
    return False


@dataclass(frozen=True)
class Info:
    """A checkpoint on disk.

    Attributes:
        path: its directory.
        progress, metrics: as they were saved; from the name alone, and empty, when the manifest is not readable.
        ok: the manifest is whole and every file has its size (checksums are read on restore).
        sequence: grows with every save into the directory; 0 when the manifest is damaged or cannot be read.
        problem: what is wrong, when not ok.
        training: the training that saved it; "" if it is not known.
    """

    path: Path
    progress: Progress
    metrics: dict[str, float]
    ok: bool
    sequence: int = 0
    problem: str = ""
    training: str = ""


def facts_of(progress: Progress, metrics: Mapping[str, float], world_size: int) -> dict[str, Any]:
    """Returns the fields of a checkpoint's manifest that are known before its files are written; JSON."""
    return {
        "progress": asdict(progress), "metrics": plain(dict(metrics)), "world_size": world_size,
        "saved_unix_s": round(time.time(), 3),
    }  # fmt: skip


@dataclass
class CheckpointFolder:
    """The checkpoints in `directory`; arguments as of `hvdtrain.Checkpointer`."""

    directory: Path
    keep: int
    best_metric: str | None
    mode: Literal["min", "max"]
    training: str = ""  # that saves here; it deletes no checkpoint of another one

    # -- writing ---------------------------------------------------------------------------------------------
    def make(self) -> None:
        """Makes the directory, or raises CheckpointError."""
        try:
            if not self.directory.is_dir():
                self.directory.mkdir(parents=True, exist_ok=True)
                sync_directory(self.directory.parent)
            self.directory = self.directory.resolve()  # one name for all who write there
        except OSError as error:
            raise self.not_written(error) from error

    def why_unmakeable(self) -> str | None:
        """Returns why this user cannot make the directory; None if it is there (perhaps only to be read), or can be."""
        place = self.directory
        while not place.exists():
            place = place.parent
        if place == self.directory and place.is_dir():
            return None
        if not place.is_dir():
            return f"{place} is not a directory"
        return None if os.access(place, os.W_OK | os.X_OK) else f"{place} is not writable by user {os.getuid()}"

    def report_others(self) -> None:
        """Reports checkpoints of another training, which this one leaves alone."""
        if there := [info for info in self.list() if info.ok]:
            print(
                f"hvdtrain: {self.directory} holds {len(there)} checkpoint(s) of another training, which was not"
                f" restored: they are kept beside the newest {self.keep} of this one",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    def add(self, facts: dict[str, Any], name: str, parts: Mapping[str, Callable[[StateFile], object]]) -> Path:
        """Writes a checkpoint under `name`, or one like it, and deletes older ones; raises CheckpointError."""
        try:
            self._sweep()
            path = self._write(facts, name, parts)
        except OSError as error:
            raise self.not_written(error) from error
        self._retain()
        return path

    def _write(self, facts: dict[str, Any], name: str, parts: Mapping[str, Callable[[StateFile], object]]) -> Path:
        temporary = self._unfinished("writing")
        temporary.mkdir()
        try:
            files = {part: put(temporary / part, write) for part, write in parts.items()}
            # by the clock: it is also greater than those that cannot be read
            sequence = max([time.time_ns() // 1_000_000, *(1 + info.sequence for info in self.list())])
            versions = {"hvdtrain": __version__, "python": ".".join(map(str, sys.version_info[:3]))}
            body = {
                "format": LAYOUT, "sequence": sequence, "training": self.training, "files": files,
                "versions": versions, **facts,
            }  # fmt: skip
            write_manifest(temporary / MANIFEST, body)
            sync_directory(temporary)
            final = self.directory / self.free_name(name)
            os.rename(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_directory(self.directory)
        return final

    def not_written(self, error: OSError) -> CheckpointError:
        do = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
        return CheckpointError(
            "a checkpoint must be written whole",
            f"{self.directory}: {error.strerror or error}",
            f"{do} (earlier checkpoints are untouched), or give another directory",
        )

    def free_name(self, name: str, taken: Sequence[str] = ()) -> str:
        """Returns `name`, or one like it that nothing has: a resumed run comes by the same step again: "name.2"."""
        base = name.partition(".")[0]
        names = itertools.chain([name], (f"{base}.{again}" for again in itertools.count(2)))
        return next(name for name in names if name not in taken and not (self.directory / name).exists())

    def _unfinished(self, what: str) -> Path:
        return self.directory / f".{what}-{socket.gethostname()}-{os.getpid()}-{time.time_ns():x}"

    def _retain(self) -> None:
        """Deletes good ones of this training that are neither among the newest `keep` nor the best."""
        try:
            good = [info for info in self.list() if info.ok and info.training == self.training]
            kept = {info.path for info in [*good[-self.keep :], *self.ranking("best", good)[:1]]}
            for info in good:
                if info.path not in kept:
                    doomed = self._unfinished("deleting")  # renamed first: a kill leaves what `_sweep` removes
                    os.rename(info.path, doomed)
                    shutil.rmtree(doomed)
        except OSError as error:  # the new checkpoint is safe, and that is what was asked for
            print(f"hvdtrain: could not delete an old checkpoint: {error}", file=sys.stderr, flush=True)

    def _sweep(self) -> None:
        """Removes what killed processes left half-written; never what a living one is writing."""
        for path in self.directory.iterdir():
            match = _UNFINISHED.fullmatch(path.name)
            if match is not None and _is_abandoned(path, match["host"], int(match["pid"])):
                shutil.rmtree(path, ignore_errors=True)

    # -- looking ---------------------------------------------------------------------------------------------
    def list(self) -> list[Info]:
        """Returns the checkpoints this process can see, oldest first; damaged ones too, with `ok=False`."""
        if not self.directory.is_dir():
            return []
        infos = [read_info(path) for path in self.directory.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(infos, key=lambda info: (info.sequence or math.inf, info.progress.step, info.path.name))

    def ranking(self, which: str, listed: Sequence[Info] | None = None) -> Sequence[Info]:
        """Returns the good checkpoints, the one to prefer first; of those that `list` gave, or gives."""
        good = [info for info in reversed(self.list() if listed is None else listed) if info.ok]
        if which == "latest":
            return good
        name = self.best_metric or ""
        ranked = [info for info in good if math.isfinite(info.metrics.get(name, math.nan))]
        return sorted(ranked, key=lambda info: info.metrics[name], reverse=self.mode == "max")


def name_of(progress: Progress) -> str:
    """Returns the name of a checkpoint's directory."""
    return f"epoch-{progress.epoch:04d}-step-{progress.step:06d}"


def put(path: Path, write: Callable[[StateFile], object]) -> Sealed:
    """Writes a file, and forces it to disk."""
    with StateFile.on_disk(path) as file:
        fill(file, write)
        return seal(file)


def fill(file: StateFile, write: Callable[[StateFile], object]) -> None:
    """Has a part written; raises the file's OSError if a library reports the lack of room in its own words."""
    try:
        write(file)
    except Exception as error:
        if file.failure is not None and file.failure is not error:
            raise file.failure from error
        raise


def read_info(path: Path) -> Info:
    """Returns what is known of a checkpoint without reading its files."""
    match = _NAME.fullmatch(path.name)
    info = Info(path, Progress(int(match[1]), int(match[2])) if match else Progress(), {}, False)
    try:
        manifest = read_manifest(path)
        progress, training = Progress(**manifest["progress"]), manifest.get("training", "")
        info = Info(path, progress, manifest["metrics"], True, manifest["sequence"], training=training)
        for name, sealed in manifest["files"].items():
            found = (path / name).stat().st_size
            if found != sealed["bytes"]:
                raise CheckpointError("file sizes must match", f"{name} has {found} bytes instead of {sealed['bytes']}")
            (path / name).open("rb").close()  # a file that cannot be read is not good
    except (OSError, HvdtrainError) as error:
        return unusable_info(info, error)
    return info


def unusable_info(info: Info, error: OSError | HvdtrainError) -> Info:
    problem = (error.received or error.rule) if isinstance(error, HvdtrainError) else (error.strerror or str(error))
    return replace(info, ok=False, problem=problem)


def _is_abandoned(path: Path, host: str, pid: int) -> bool:
    """Returns True if no process can still be writing there: the process is gone, or a day has passed."""
    if host == socket.gethostname() and (pid == os.getpid() or not Path(f"/proc/{pid}").exists()):
        return True
    try:
        return time.time() - path.stat().st_mtime > _ABANDONED_S
    except FileNotFoundError:
        return False
