"""Checkpoints that a kill at any instant, a full disk or a flipped bit cannot turn into a loss.

A checkpoint is a directory, written under a temporary name, forced to disk and renamed: it is there whole or
    not at all.
Its manifest has the size and SHA-256 of every file, and a digest of itself; what does not match is passed
over for the last good one, and said so. Older ones are deleted only after a newer one is complete.

    checkpoints/epoch-0003-step-000042/manifest.json  model.keras  random.npz
"""

from __future__ import annotations

import math
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from hvdtrain import __version__
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.manifest import (
    MANIFEST,
    json_numbers,
    read_manifest,
    seal,
    sync_directory,
    verify,
    write_manifest,
)
from hvdtrain.world import World, current

CHUNK_BYTES = 64 << 20
_NAME = re.compile(r"epoch-(\d+)-step-(\d+)(?:\.(\d+))?")
_UNFINISHED = re.compile(r"\.(?:writing|deleting)-(?P<host>.+)-(?P<pid>\d+)-[^-]+")
_ABANDONED_S = 24 * 3600.0


@dataclass(frozen=True)
class Progress:
    """Where training stands; counts are of all ranks together.

    Attributes:
        epoch: the epoch to go on with, counted from 0.
        step: updates done.
        samples_seen: samples since the start of training.
        samples_in_epoch: samples done in `epoch`.
    """

    epoch: int = 0
    step: int = 0
    samples_seen: int = 0
    samples_in_epoch: int = 0


class Part(Protocol):
    """One file of a checkpoint."""

    def save(self, path: Path) -> None:
        """Write the state to `path`; called on rank 0."""
        ...

    def load(self, path: Path) -> None:
        """Take the state from `path`; called on every rank, with the same content."""
        ...


@dataclass(frozen=True)
class Info:
    """One checkpoint on disk. `ok`: the manifest is whole and every file has its size (checksums are read on
    restore)."""

    path: Path
    progress: Progress
    metrics: dict[str, float]
    ok: bool
    sequence: int = 0
    problem: str = ""


class Checkpointer:
    """Saves and restores the state of training in `directory`.

    Args:
        directory: made at the first save.
        world: default: the world of the last `init()`, else one process.
        keep: how many of the newest to keep.
        best: the metric by which one more is kept, however old; None: none.
        mode: whether "min" or "max" of it is best.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        world: World | None = None,
        keep: int = 3,
        best: str | None = "val_loss",
        mode: Literal["min", "max"] = "min",
    ) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ConfigError("keep must be a whole number >= 1", f"keep={keep!r}")
        if mode not in ("min", "max"):
            raise ConfigError('mode must be "min" or "max"', f"mode={mode!r}")
        self.directory = Path(directory)
        self.keep = keep
        self.best_metric = best
        self.mode = mode
        self._world = world

    @property
    def world(self) -> World:
        return self._world or current() or World.solo()

    # -- saving ----------------------------------------------------------------------------------------------
    def save(
        self, state: Mapping[str, Part], *, progress: Progress, metrics: Mapping[str, float] | None = None
    ) -> Path:
        """Write one checkpoint; collective: rank 0 writes, the others wait.

        Args:
            state: file name to what goes into it.
            progress: where training stands.
            metrics: of all ranks together; `best` is looked up here.

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointError (`MainRankError` on ranks other than 0): it cannot be written; earlier ones are
                untouched.
        """
        return self.world.on_main(self._save, state, progress, dict(metrics or {}))

    def _save(self, state: Mapping[str, Part], progress: Progress, metrics: dict[str, float]) -> Path:
        _check_names(state)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._sweep()
            earlier = self.list()
            path = self._write(
                state, progress, metrics, 1 + max((info.sequence for info in earlier), default=0)
            )
        except OSError as error:
            raise CheckpointError(
                "a checkpoint must be written whole",
                f"{self.directory}: {error.strerror or error}",
                "make room (earlier checkpoints are untouched), or give another directory",
            ) from error
        self._retain()
        return path

    def _write(
        self, state: Mapping[str, Part], progress: Progress, metrics: dict[str, float], sequence: int
    ) -> Path:
        temporary = self._unfinished("writing")
        temporary.mkdir()
        try:
            files = {}
            for name, part in state.items():
                part.save(temporary / name)
                files[name] = seal(temporary / name)
            body = {
                "format": 1, "sequence": sequence,
                "progress": asdict(progress), "metrics": json_numbers(metrics),
                "files": files, "saved_unix_s": round(time.time(), 3), "world_size": self.world.size,
                "versions": {"hvdtrain": __version__, "python": ".".join(map(str, sys.version_info[:3]))},
            }  # fmt: skip
            write_manifest(temporary / MANIFEST, body)
            sync_directory(temporary)
            final = self._free_name(progress)
            os.rename(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_directory(self.directory)
        return final

    def _free_name(self, progress: Progress) -> Path:
        """Return a name for a new checkpoint; a resumed run may come by the same step again, and gets
        "name.2"."""
        base = f"epoch-{progress.epoch:04d}-step-{progress.step:06d}"
        path = self.directory / base
        again = 1
        while path.exists():
            again += 1
            path = self.directory / f"{base}.{again}"
        return path

    def _unfinished(self, what: str) -> Path:
        return self.directory / f".{what}-{socket.gethostname()}-{os.getpid()}-{time.time_ns():x}"

    def _retain(self) -> None:
        """Delete what is neither among the newest `keep` good ones nor the best."""
        infos = self.list()
        good = [info for info in infos if info.ok]
        kept = {info.path for info in good[-self.keep :]}
        best = self.best()
        if best is not None:
            kept.add(best.path)
        oldest_kept = min(info.sequence for info in good if info.path in kept)
        for info in infos:
            # a damaged one goes when its time has come; an unreadable manifest has no sequence, and stays to
            # be seen
            if info.path not in kept and (info.ok or 0 < info.sequence < oldest_kept):
                self._delete(info.path)

    def _delete(self, path: Path) -> None:
        """Delete by renaming first: a kill in the middle leaves rubbish that is swept, not half a
        checkpoint."""
        doomed = self._unfinished("deleting")
        try:
            os.rename(path, doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            print(
                f"hvdtrain: could not delete the old checkpoint {path}: {error}", file=sys.stderr, flush=True
            )

    def _sweep(self) -> None:
        """Remove what killed processes left half-written; never what a living one is writing."""
        for path in self.directory.iterdir():
            match = _UNFINISHED.fullmatch(path.name)
            if match is not None and _is_abandoned(path, match["host"], int(match["pid"])):
                shutil.rmtree(path, ignore_errors=True)

    # -- looking ---------------------------------------------------------------------------------------------
    def list(self) -> list[Info]:
        """Return the checkpoints this process can see, oldest first; damaged ones too, with `ok=False`."""
        if not self.directory.is_dir():
            return []
        infos = [_read_info(path) for path in self.directory.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(infos, key=lambda info: (info.sequence or math.inf, info.progress.step, info.path.name))

    def latest(self) -> Info | None:
        """Return the newest good checkpoint, or None."""
        return next(self._candidates("latest"), None)

    def best(self) -> Info | None:
        """Return the good checkpoint with the best `best` metric (the newer of equals), or None."""
        return next(self._candidates("best"), None)

    def _candidates(self, which: str) -> Iterator[Info]:
        """Yield good checkpoints, the one to prefer first."""
        good = [info for info in reversed(self.list()) if info.ok]
        if which == "best":
            name = self.best_metric or ""
            good = [info for info in good if math.isfinite(info.metrics.get(name, math.nan))]
            good.sort(key=lambda info: info.metrics[name], reverse=self.mode == "max")
        yield from good

    # -- restoring -------------------------------------------------------------------------------------------
    def restore(
        self, state: Mapping[str, Part], *, which: str | os.PathLike[str] = "latest"
    ) -> Progress | None:
        """Load one checkpoint on every rank; collective. Rank 0 chooses, and its choice is what every rank
        gets.

        Ranks that do not see that checkpoint (no shared file system, or a stale one) get the bytes from rank
        0.

        Args:
            state: file name to what takes its content; files of the checkpoint that are not named here are
                left alone.
            which: "latest", "best", or the path of one checkpoint.

        Returns:
            The progress, or None when there is no checkpoint at all.

        Raises:
            CheckpointError (`MainRankError` on ranks other than 0): none of the checkpoints is good, the one
                at `which` is not, it lacks a file that `state` names, or a rank could not load it.
        """
        chosen = self.world.on_main(self._choose, os.fspath(which), sorted(state))
        if chosen is None:
            return None
        path, manifest = chosen
        files = {name: manifest["files"][name] for name in sorted(state)}
        with self._local_copy(path, files) as folder:
            self._load(state, folder)
        return Progress(**manifest["progress"])

    def _choose(self, which: str, names: Sequence[str]) -> tuple[Path, dict[str, Any]] | None:
        """Return the path and manifest of the checkpoint to restore, every checksum read."""
        if which in ("latest", "best"):
            infos = self._candidates(which)
            damaged = [f"{info.path.name}: {info.problem}" for info in self.list() if not info.ok]
            some = bool(self.list())
        else:
            infos, damaged, some = iter([_read_info(Path(which))]), [], True
        for info in infos:
            try:
                manifest = read_manifest(info.path)
                verify(info.path, manifest["files"])
            except (OSError, CheckpointError) as error:
                damaged.append(f"{info.path.name}: {_reason(error)}")
                continue
            _check_has(manifest, names, info.path)
            if damaged:
                print("hvdtrain: damaged checkpoint passed over: " + "; ".join(damaged), file=sys.stderr)
                print(f"hvdtrain: going on from {info.path}", file=sys.stderr, flush=True)
            return info.path, manifest
        if not some:
            return None
        if which == "best" and not damaged:
            return self._choose("latest", names)
        raise CheckpointError(
            "no checkpoint is whole",
            "\n".join([str(self.directory if which in ("latest", "best") else which), *damaged]),
            "give another checkpoint or directory; to start anew, move this one away",
        )  # fmt: skip

    @contextmanager
    def _local_copy(self, path: Path, files: Mapping[str, dict[str, Any]]) -> Iterator[Path]:
        """Give a folder with the checkpoint's files on this rank; fetched from rank 0 where they are
        missing."""
        here = self.world.is_main or _has(path, files)
        if all(self.world.gather(here)):
            yield path
            return
        with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder:
            for name, sealed in files.items():
                self._send(path / name, None if here else Path(folder) / name, sealed["bytes"])
            if not here:
                verify(Path(folder), files)
            yield path if here else Path(folder)

    def _send(self, source: Path, target: Path | None, size_bytes: int) -> None:
        """Broadcast a file from rank 0 in chunks; ranks with a `target` write it there."""
        with (
            open(source, "rb") if self.world.is_main else _nothing() as reader,
            open(target, "wb") if target is not None else _nothing() as writer,
        ):
            for _ in range(0, size_bytes, CHUNK_BYTES):
                data = self.world.comm.broadcast_bytes(reader.read(CHUNK_BYTES) if reader else None, 0)
                if writer:
                    writer.write(data)

    def _load(self, state: Mapping[str, Part], folder: Path) -> None:
        """Load every part; when one rank fails, all raise, so that none trains on alone."""
        failure: Exception | None = None
        try:
            for name in sorted(state):
                state[name].load(folder / name)
        except Exception as error:
            failure = error
        reports = self.world.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if any(reports):
            raise CheckpointError(
                "every rank must be able to load the checkpoint",
                "\n".join(f"rank {rank}: {report}" for rank, report in enumerate(reports) if report),
                "the model, optimizer or versions may not be those that saved it",
                shared=True,
            ) from failure


@contextmanager
def _nothing() -> Iterator[None]:
    yield None


def _check_names(state: Mapping[str, Part]) -> None:
    for name in state:
        if name == MANIFEST or Path(name).name != name or name.startswith("."):
            raise ConfigError("a checkpoint's parts are plain file names", repr(name))
    if not state:
        raise ConfigError("a checkpoint needs at least one part")


def _check_has(manifest: dict[str, Any], names: Sequence[str], path: Path) -> None:
    missing = sorted(set(names) - set(manifest["files"]))
    if missing:
        raise CheckpointError(
            "a checkpoint must have every file that is to be restored",
            f"{path} lacks {', '.join(missing)}; it has {', '.join(sorted(manifest['files']))}",
            "restore with the same framework, and the same kind of model and optimizer, that saved it",
        )


def _read_info(path: Path) -> Info:
    """Return what is known of a checkpoint without reading its files."""
    try:
        manifest = read_manifest(path)
        problem = ""
        for name, sealed in manifest["files"].items():
            found = (path / name).stat().st_size
            if found != sealed["bytes"]:
                problem = f"{name} has {found} bytes instead of {sealed['bytes']}"
    except (OSError, CheckpointError) as error:
        match = _NAME.fullmatch(path.name)
        progress = Progress(int(match[1]), int(match[2])) if match else Progress()
        return Info(path, progress, {}, False, problem=_reason(error))
    return Info(
        path,
        Progress(**manifest["progress"]),
        manifest["metrics"],
        not problem,
        manifest["sequence"],
        problem,
    )


def _has(path: Path, files: Mapping[str, dict[str, Any]]) -> bool:
    """Whether this rank sees the same checkpoint as rank 0."""
    try:
        verify(path, files)
    except (OSError, CheckpointError):
        return False
    return True


def _reason(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return error.came or error.rule
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _is_abandoned(path: Path, host: str, pid: int) -> bool:
    if host == socket.gethostname():
        return pid == os.getpid() or not Path(f"/proc/{pid}").exists()
    try:
        return time.time() - path.stat().st_mtime > _ABANDONED_S
    except FileNotFoundError:
        return False
