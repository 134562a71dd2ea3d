"""Checkpoints that a kill at any instant, a full disk or a flipped bit cannot turn into a loss.

A checkpoint is a directory, written under a temporary name, forced to disk and renamed: it is there whole or not at
all. Its manifest has the size and SHA-256 of every file, and a digest of itself; what does not match is passed over for
the last good one, and said so. Older ones are deleted only after a newer one is complete.

    checkpoints/epoch-0003-step-000042/manifest.json  model.keras  random.npz
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hvdtrain.core.errors import CheckpointError, ConfigError, HvdtrainError
from hvdtrain.core.version import __version__
from hvdtrain.core.world import World, current
from hvdtrain.runs import preemption
from hvdtrain.runs.checkpoint_files import (
    MANIFEST,
    direction_of,
    local_copy,
    read_manifest,
    seal,
    sync_directory,
    verify,
    write_manifest,
)
from hvdtrain.runs.log_files import plain
from hvdtrain.runs.parts import Part, Progress

_NAME = re.compile(r"epoch-(\d+)-step-(\d+)(?:\.(\d+))?")
_UNFINISHED = re.compile(r"\.(?:writing|deleting)-(?P<host>.+)-(?P<pid>\d+)-[^-]+")
_ABANDONED_S = 24 * 3600.0


@dataclass(frozen=True)
class Info:
    """One checkpoint on disk.

    Attributes:
        path: its directory.
        progress, metrics: as they were saved; from the name alone, and empty, when the manifest is not readable.
        ok: the manifest is whole and every file has its size (checksums are read on restore).
        sequence: grows with every save into the directory; 0 when the manifest is damaged or cannot be read.
        problem: what is wrong, when not ok.
        damaged: it is wrong for good: files lack, or are not as they were saved. False for what cannot be read now
            (a permission, an I/O error, a newer format): another day, or another host, may read it.
    """

    path: Path
    progress: Progress
    metrics: dict[str, float]
    ok: bool
    sequence: int = 0
    problem: str = ""
    damaged: bool = False


class Checkpointer:
    """Saves and restores the state of training in `directory`.

    Args:
        directory: made at the first save.
        world: default: the world of the last `init()`, else one process.
        keep: how many of the newest to keep.
        best: the metric by which one more is kept, however old; None: none.
        mode: whether "min" or "max" of it is best; None: as its name says (losses and errors "min", accuracies "max").

    Raises:
        ConfigError: an argument is wrong, or the metric's name does not say which way is better.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        world: World | None = None,
        keep: int = 3,
        best: str | None = "val_loss",
        mode: Literal["min", "max"] | None = None,
    ) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ConfigError("keep must be a whole number >= 1", f"keep={keep!r}")
        if mode not in ("min", "max", None):
            raise ConfigError('mode must be "min" or "max"', f"mode={mode!r}")
        self.directory = Path(directory)
        self.keep = keep
        self.best_metric = best
        self.mode = mode or ("min" if best is None else direction_of(best))
        self._world = world
        self._reported: set[Path] = set()

    @property
    def world(self) -> World:
        return self._world or current() or World.solo()

    # -- saving ----------------------------------------------------------------------------------------------
    def save(
        self, state: Mapping[str, Part], *, progress: Progress, metrics: Mapping[str, float] | None = None
    ) -> Path:
        """Writes one checkpoint; collective: the parts bring their state together, rank 0 writes, the others wait.

        Args:
            state: file name to what goes into it.
            progress: where training stands.
            metrics: of all ranks together; `best` is looked up here.

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointError: it cannot be written, earlier ones are untouched (`MainRankError` on ranks
                other than 0).
            NonFiniteError: weights are not finite: nothing is written, earlier ones are untouched.
            ReplicaError: ranks are not at the same point of the training.
        """
        self.world.agree("progress at a checkpoint", progress)
        for part in state.values():
            part.collect()
        path = self.world.on_main(self._save, state, progress, dict(metrics or {}))
        preemption.remember(self, state)
        return path

    def on_preemption(self, state: Mapping[str, Part]) -> None:
        """Says what to save where the job is told to end (SIGTERM, SIGUSR1) before the first `save` or `restore`."""
        preemption.remember(self, state, saved=False)

    def _save(self, state: Mapping[str, Part], progress: Progress, metrics: dict[str, float]) -> Path:
        _check_names(state)
        try:
            if not self.directory.is_dir():
                self.directory.mkdir(parents=True, exist_ok=True)
                sync_directory(self.directory.parent)
            self._sweep()
            known = [info.sequence for info in self.list()]
            # one whose number cannot be read may have any: that of a clock is greater than it was
            sequence = 1 + max(known + [0 if all(known) else time.time_ns() // 1_000_000])
            path = self._write(state, progress, metrics, sequence)
        except OSError as error:
            raise CheckpointError(
                "a checkpoint must be written whole",
                f"{self.directory}: {error.strerror or error}",
                "make room (earlier checkpoints are untouched), or give another directory",
            ) from error
        self._retain()
        return path

    def _write(self, state: Mapping[str, Part], progress: Progress, metrics: dict[str, float], sequence: int) -> Path:
        temporary = self._unfinished("writing")
        temporary.mkdir()
        mode = temporary.stat().st_mode & 0o666  # as the umask has it; libraries make files that only their owner reads
        try:
            files = {}
            for name, part in state.items():
                _save_part(part, temporary / name)
                files[name] = seal(temporary / name, mode)
            body = {
                "format": 1, "sequence": sequence,
                "progress": asdict(progress), "metrics": plain({name: float(value) for name, value in metrics.items()}),
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
        """Returns an unused name; a resumed run may come by the same step again, and gets "name.2"."""
        base = f"epoch-{progress.epoch:04d}-step-{progress.step:06d}"
        names = itertools.chain([base], (f"{base}.{again}" for again in itertools.count(2)))
        return next(path for path in map(self.directory.joinpath, names) if not path.exists())

    def _unfinished(self, what: str) -> Path:
        return self.directory / f".{what}-{socket.gethostname()}-{os.getpid()}-{time.time_ns():x}"

    def _retain(self) -> None:
        """Deletes what is neither among the newest `keep` good ones nor the best."""
        try:
            infos = self.list()
            good = [info for info in infos if info.ok]
            kept = {info.path for info in [*good[-self.keep :], *self._ranking("best")[:1]]}
            oldest_kept_step = min((info.progress.step for info in good if info.path in kept), default=0)
            for info in infos:
                # a damaged one goes when it is older than all that is kept: until then it is reported
                if info.path in kept or not (info.ok or info.progress.step < oldest_kept_step):
                    continue
                if info.ok or info.damaged:
                    self._delete(info.path)
                elif info.path not in self._reported:
                    self._reported.add(info.path)
                    print(f"hvdtrain: keeping {info.path}, which cannot be read: {info.problem}", file=sys.stderr)
        except OSError as error:  # the new checkpoint is safe, and that is what was asked for
            print(f"hvdtrain: could not delete an old checkpoint: {error}", file=sys.stderr, flush=True)

    def _delete(self, path: Path) -> None:
        """Rename, then delete: a kill in between leaves rubbish that is swept, not half a checkpoint."""
        doomed = self._unfinished("deleting")
        os.rename(path, doomed)
        shutil.rmtree(doomed)

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
        infos = [_read_info(path) for path in self.directory.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(infos, key=lambda info: (info.sequence or math.inf, info.progress.step, info.path.name))

    def latest(self) -> Info | None:
        """Returns the newest good checkpoint, or None."""
        return next(iter(self._ranking("latest")), None)

    def best(self) -> Info | None:
        """Returns the good checkpoint with the best `best` metric (the newer of equals), or None."""
        return next(iter(self._ranking("best")), None)

    def _ranking(self, which: str) -> Sequence[Info]:
        """Returns the good checkpoints, the one to prefer first."""
        good = [info for info in reversed(self.list()) if info.ok]
        if which == "latest":
            return good
        name = self.best_metric or ""
        ranked = [info for info in good if math.isfinite(info.metrics.get(name, math.nan))]
        return sorted(ranked, key=lambda info: info.metrics[name], reverse=self.mode == "max")

    # -- restoring -------------------------------------------------------------------------------------------
    def restore(self, state: Mapping[str, Part], *, which: str | os.PathLike[str] = "latest") -> Progress | None:
        """Loads one checkpoint on every rank; collective.

        Rank 0 chooses, and its choice is what every rank gets: ranks that do not see that checkpoint (no
        shared file system, or a stale one) are sent its bytes.

        Args:
            state: file name to what takes its content; files of the checkpoint that are not named here are
                left alone.
            which: "latest", "best", or the path of one checkpoint.

        Returns:
            The progress, or None when there is no checkpoint at all.

        Raises:
            CheckpointError: none of the checkpoints is good, the one at `which` is not, none has the metric
                for "best", it lacks a file that `state` names, or a rank could not load it (`MainRankError`
                on ranks other than 0 where rank 0 found out).
        """
        chosen = self.world.on_main(self._choose, os.fspath(which), sorted(state))
        if chosen is None:
            return None
        name, manifest = chosen
        # every rank looks in its own directory: paths may differ between hosts, names do not
        path = self.directory / name if which in ("latest", "best") else Path(which)
        files = {name: manifest["files"][name] for name in sorted(state)}
        with local_copy(self.world, path, files) as (folder, failure):
            self._load(state, folder, failure)
        progress = Progress(**manifest["progress"])
        for part in state.values():
            part.restored(progress)
        preemption.remember(self, state)
        return progress

    def _choose(self, which: str, names: Sequence[str]) -> tuple[str, dict[str, Any]] | None:
        """Returns the name and manifest of the checkpoint to restore, every checksum read."""
        if which in ("latest", "best"):
            known, ranking = self.list(), self._ranking(which)
            if not known:
                return None
        else:
            known = ranking = [_read_info(Path(which))]
        unusable = {info.path: info for info in known if not info.ok}
        for info in ranking:
            try:
                manifest = read_manifest(info.path)
                verify(info.path, manifest["files"])
            except (OSError, HvdtrainError) as error:
                unusable[info.path] = _unusable(info, error)
                continue
            _check_has(manifest, names, info.path)
            _report_fallback(info, unusable.values())
            return info.path.name, manifest
        if which == "best" and not unusable:
            raise CheckpointError(
                f"the best checkpoint is the one with the best {self.best_metric}",
                f"none of {len(known)} in {self.directory} has it as a finite number",
                'restore which="latest", or give save() that metric',
            )
        raise CheckpointError(
            "no checkpoint is whole",
            "\n".join(f"{path}: {info.problem}" for path, info in unusable.items()),
            "give another checkpoint or directory; to start anew, move this one away",
        )

    def _load(self, state: Mapping[str, Part], folder: Path, failure: Exception | None) -> None:
        """Loads every part; when one rank fails, all raise, so that none trains on alone."""
        try:
            names = sorted(state) if failure is None else ()
            for name in names:
                state[name].check(folder / name)
            for name in names:
                state[name].load(folder / name)
        except Exception as error:
            failure = error
        reports = self.world.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if isinstance(failure, CheckpointError) and len(set(reports)) == 1:
            failure.shared = True
            raise failure  # every rank says the same: once is enough
        if any(reports):
            raise CheckpointError(
                "every rank must be able to load the checkpoint",
                "\n".join(f"rank {rank}: {report}" for rank, report in enumerate(reports) if report),
                "the model, optimizer or versions may not be those that saved it",
                shared=True,
            ) from failure


def _report_fallback(chosen: Info, unusable: Iterable[Info]) -> None:
    """Says which checkpoints that cannot be used would have come before `chosen`."""
    newer = [  # saved later, or maybe: a run that went back to an earlier step saves lower ones
        info
        for info in unusable
        if info.progress.step >= chosen.progress.step or not 0 < info.sequence < chosen.sequence
    ]
    for info in newer:
        kind = "damaged" if info.damaged else "unreadable"
        print(f"hvdtrain: passing over the {kind} checkpoint {info.path}: {info.problem}", file=sys.stderr)
    if newer:
        print(f"hvdtrain: falling back to {chosen.path}, the last good one", file=sys.stderr, flush=True)


def _save_part(part: Part, path: Path) -> None:
    """Saves a part; one more write shows whether the disk is full, which libraries say in words of their own.

    Raises:
        OSError: there is no room.
    """
    try:
        part.save(path)
    except (OSError, HvdtrainError):
        raise
    except Exception as error:
        try:
            with open(path, "ab") as file:
                file.write(bytes(1 << 20))
                file.flush()
                os.fsync(file.fileno())
        except OSError as full:
            raise full from error
        raise


def _check_names(state: Mapping[str, Part]) -> None:
    for name in state:
        if not name or name == MANIFEST or Path(name).name != name or name.startswith("."):
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
    """Returns what is known of a checkpoint without reading its files."""
    match = _NAME.fullmatch(path.name)
    info = Info(path, Progress(int(match[1]), int(match[2])) if match else Progress(), {}, False)
    try:
        manifest = read_manifest(path)
        info = Info(path, Progress(**manifest["progress"]), manifest["metrics"], True, manifest["sequence"])
        for name, sealed in manifest["files"].items():
            found = (path / name).stat().st_size
            if found != sealed["bytes"]:
                raise CheckpointError("a file has its size", f"{name} has {found} bytes instead of {sealed['bytes']}")
            (path / name).open("rb").close()  # what cannot be read is not good, and not damaged either
    except (OSError, HvdtrainError) as error:
        return _unusable(info, error)
    return info


def _unusable(info: Info, error: OSError | HvdtrainError) -> Info:
    damaged = isinstance(error, (CheckpointError, FileNotFoundError, NotADirectoryError, IsADirectoryError))
    problem = (error.received or error.rule) if isinstance(error, HvdtrainError) else (error.strerror or str(error))
    return replace(info, ok=False, problem=problem, damaged=damaged)


def _is_abandoned(path: Path, host: str, pid: int) -> bool:
    """Whether no process can be writing there any more: it is gone, or a day has passed."""
    if host == socket.gethostname() and (pid == os.getpid() or not Path(f"/proc/{pid}").exists()):
        return True
    try:
        return time.time() - path.stat().st_mtime > _ABANDONED_S
    except FileNotFoundError:
        return False
