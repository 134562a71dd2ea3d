"""Checkpoints that survive a kill at any instant, a full disk or a flipped bit.

The files: `hvdtrain.checkpoint.checkpoint_folder`. A checkpoint that does not match its checksum is skipped, with a
message. Training waits for a copy of its state in memory; a separate process (`hvdtrain.checkpoint.writer`) writes it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet, WeakValueDictionary

from hvdtrain.checkpoint.checkpoint_files import MANIFEST, direction_of, local_copy, read_manifest, verify
from hvdtrain.checkpoint.checkpoint_folder import (
    CheckpointFolder,
    Info,
    Lock,
    facts_of,
    fill,
    is_taken,
    name_of,
    read_info,
    unusable_info,
)
from hvdtrain.checkpoint.parts import Part, Progress, remember
from hvdtrain.checkpoint.writer import Writer, running, started
from hvdtrain.comm import elastic
from hvdtrain.comm.elastic import repeated
from hvdtrain.core.errors import CheckpointError, ConfigError, HvdtrainError
from hvdtrain.core.keywords import refuses_other_keywords
from hvdtrain.record.folder import place_of
from hvdtrain.record.log import RunLog
from hvdtrain.world.world import World, current

# directories that this process has taken; several Checkpointers of one program share a lock
_LOCKS: WeakValueDictionary[Path, Lock] = WeakValueDictionary()
# directory to the training that this program saves there: a new one, or that of the checkpoint it has restored
_TRAININGS: dict[Path, str] = {}
# directory to the models of that training
_TRAINED: dict[Path, WeakSet[Any]] = {}


def _models_of(state: Mapping[str, Part]) -> list[object]:
    return [model for part in state.values() if (model := part.trained) is not None]


@refuses_other_keywords(monitor='best="val_loss", the metric that decides', save_best_only="keep=1")
class Checkpointer:
    """Saves and restores the state of training in a directory.

    Example:
        checkpoints = hvdtrain.Checkpointer("run/checkpoints", best="top1")
        state = hvt.model_state(model, optimizer)
        progress = checkpoints.restore(state)  # None if there is no checkpoint
        checkpoints.save(state, progress=optimizer.progress, metrics=scores)

    Args:
        directory: created at the first save. One training holds it at a time (a lock that ends with the process); other
            programs can read it. It keeps checkpoints of an earlier training that this one did not restore.
        world: the ranks; default: those of the last `init()`, else one process.
        keep: how many of the newest checkpoints to keep.
        best: the metric whose best checkpoint is also kept, whatever its age; None: no such checkpoint.
        asynchronous: training continues during the write. Rank 0 needs memory for one more state, or for two if the
            disk is slower than the saves. False: training waits.
        run: the run's record; each save adds an event with its bytes and seconds.
        mode: the better direction of `best`, "min" or "max"; None: by name (losses and errors "min", accuracies "max").

    Raises:
        ConfigError: an argument is wrong, or the metric's name does not show which direction is better.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        world: World | None = None,
        keep: int = 3,
        best: str | None = "val_loss",
        mode: Literal["min", "max"] | None = None,
        asynchronous: bool = True,
        run: RunLog | None = None,
    ) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ConfigError("keep must be a whole number >= 1", f"keep={keep!r}")
        if mode not in ("min", "max", None):
            raise ConfigError('mode must be "min" or "max"', f"mode={mode!r}")
        self.directory = place_of(directory).absolute()  # wherever the program goes
        self.folder = CheckpointFolder(
            self.directory, keep, best, mode or ("min" if best is None else direction_of(best))
        )
        self.asynchronous = asynchronous
        self.run = run
        self._world = world
        self._lock: Lock | None = None
        self._best_is_missing = False
        if (world or current()) is not None and self.world.is_main:
            self._look()

    @property
    def world(self) -> World:
        return self._world or current() or World.solo()

    @property
    def _place(self) -> Path:
        """The directory by the one name that all spellings of it have."""
        return self.directory.resolve()

    def _look(self) -> None:
        """Reports at the start why the first save would fail, if it would."""
        problem = self.folder.why_unmakeable()
        if problem is None and self._place not in _LOCKS and is_taken(self.directory):
            problem = "it is in use by another process; its checkpoints can be read"
        if problem is not None:
            print(f"hvdtrain: save() cannot write to {self.directory}: {problem}", file=sys.stderr, flush=True)

    def _take(self) -> None:
        """Makes the directory and locks it for this training; call it on rank 0."""
        self.folder.make()
        known = [lock for lock in (self._lock, _LOCKS.get(self._place)) if lock is not None]
        # it may have been moved away, or deleted, since this one took it, and another one of this program took it anew
        self._lock = next((lock for lock in known if lock.holds(self._place)), None)
        try:
            self._lock = _LOCKS[self._place] = self._lock or Lock(self._place)
        except CheckpointError:
            if not elastic.ranks().may_change:  # else the lost rank 0 may still have it: taken at a later save
                raise
        except OSError as error:
            raise self.folder.not_written(error) from error

    # -- saving ----------------------------------------------------------------------------------------------
    @refuses_other_keywords(progress="progress=optimizer.progress, for a prepared optimizer of PyTorch")
    def save(
        self, state: Mapping[str, Part], *, progress: Progress, metrics: Mapping[str, float] | None = None
    ) -> Path:
        """Saves a checkpoint and returns its directory; collective.

        The directory appears when the checkpoint is complete. `wait`, every search for checkpoints on rank 0, and the
        end of the program wait for that. If two earlier ones are being written, `save` waits for the first of them.

        Args:
            state: file name to the part that it stores, as `model_state` returns it.
            progress: the progress of training.
            metrics: of all ranks together, by name; `best` is one of them.

        Raises:
            CheckpointError: this or an earlier checkpoint could not be written (`MainRankError` on ranks other than 0);
                others are untouched. After an earlier one failed, this one is not saved: save again.
            NonFiniteError: weights are not finite; nothing is written.
            ReplicaError: ranks are at different points of the training.
        """
        path = self._save_all(state, progress, {name: float(value) for name, value in (metrics or {}).items()})
        remember(self, state)
        return path

    @repeated
    def _save_all(self, state: Mapping[str, Part], progress: Progress, metrics: dict[str, float]) -> Path:
        noted = SaveEvent(self.run, progress) if self.run is not None and self.world.is_main else None
        self.world.agree("progress at a checkpoint", progress)
        for part in state.values():
            part.collect()
        self._report_missing_best(metrics)
        # in an elastic job another rank may be the one to save next
        path, _TRAININGS[self._place] = self.world.on_main(self._save, state, progress, metrics, noted)
        if noted is not None:
            noted.went_on(self._settle)
        return path

    def _report_missing_best(self, metrics: Mapping[str, float]) -> None:
        """Reports once that no best checkpoint is kept, as its metric is not among those that are given."""
        best = self.folder.best_metric
        if self._best_is_missing or not metrics or best is None or best in metrics:
            return
        self._best_is_missing = True
        if self.world.is_main:
            names = ", ".join(map(repr, metrics))
            print(
                f"hvdtrain: no best checkpoint is kept: save() got the metrics {names}, and not {best!r}\n"
                f"  fix: Checkpointer(..., best={next(iter(metrics))!r}), or best=None",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    def on_preemption(self, state: Mapping[str, Part]) -> None:
        """Sets the state to save if the job is preempted (SIGTERM, SIGUSR1) before the first `save` or `restore`.

        Raises:
            CheckpointError: on rank 0: another training has the directory.
        """
        if self.world.is_main:
            self._take()
        remember(self, state, saved=False)

    def _prepare(self, state: Mapping[str, Part]) -> Writer | None:
        for name in state:
            if not name or name == MANIFEST or Path(name).name != name or name.startswith("."):
                raise ConfigError("names of a checkpoint's parts must be plain file names", repr(name))
        if not state:
            raise ConfigError("a checkpoint needs at least one part")
        self._take()
        self._check_trained(state)
        if self._place not in _TRAININGS:
            self.folder.report_others()
            _TRAININGS[self._place] = uuid.uuid4().hex
        self.folder.training = _TRAININGS[self._place]
        writer = started() if self.asynchronous else running()
        if writer is not None:
            if self.asynchronous:
                writer.wait_for_room()  # before the failures are read: the save that is waited for here may also fail
            writer.check(self.folder.directory)
        return writer

    def _check_trained(self, state: Mapping[str, Part]) -> None:
        """Raises `CheckpointError` for a model of another training than the one that this program saves here."""
        models, known = _models_of(state), _TRAINED.get(self._place)
        if models and known is not None and not any(model in known for model in models):
            if self._has_own():
                raise CheckpointError(
                    "a checkpoint directory belongs to one training: this model must not save there",
                    f"{self.directory} has the checkpoints of another model of this program",
                    "give each its own: Checkpointer('checkpoints/fold-2');\n"
                    "or call restore() first, to continue that training",
                    code=39,
                )
            _TRAINED.pop(self._place, None)
            _TRAININGS.pop(self._place, None)
        self._note_trained(state)

    def _has_own(self) -> bool:
        """Returns True if the directory has checkpoints that may be of this training (it may have been emptied)."""
        self._settle()
        training = _TRAININGS.get(self._place)
        return any(info.training in ("", training) for info in self.folder.list())

    def _note_trained(self, state: Mapping[str, Part]) -> None:
        """Adds models to those of the training that this program saves here."""
        if models := _models_of(state):
            _TRAINED.setdefault(self._place, WeakSet()).update(models)

    def _save(
        self, state: Mapping[str, Part], progress: Progress, metrics: dict[str, float], noted: SaveEvent | None
    ) -> tuple[Path, str]:
        """Returns the checkpoint's directory and the training."""
        writer = self._prepare(state)
        name, facts = name_of(progress), facts_of(progress, metrics, self.world.size)
        if writer is not None and self.asynchronous:
            try:
                with writer.lock:
                    return self._submit(writer, state, name, facts, noted), self.folder.training
            except OSError as error:
                print(f"hvdtrain: this checkpoint is written before training continues: {error}", file=sys.stderr)
        self._settle()
        path = self.folder.add(facts, name, {file: part.write for file, part in state.items()})
        if noted is not None:
            noted.ended(path)
        return path, self.folder.training

    def _submit(
        self, writer: Writer, state: Mapping[str, Part], name: str, facts: dict[str, Any], noted: SaveEvent | None
    ) -> Path:
        writer.start()
        images = writer.images()
        files = {part: images.file(part) for part in state}
        for part, file in files.items():
            fill(file, state[part].write)
        return writer.submit(images, files, self.folder, name, facts, noted=None if noted is None else noted.ended)

    def wait(self) -> None:
        """Waits until every saved checkpoint is on disk; collective.

        Raises:
            CheckpointError: one could not be written (`MainRankError` on ranks other than 0).
        """
        self.world.on_main(self._settle, check=True)

    def _settle(self, *, check: bool = False) -> None:
        writer = running()
        if writer is not None:
            writer.wait(self.folder.directory)
            if check:
                writer.check(self.folder.directory)

    # -- looking ---------------------------------------------------------------------------------------------
    def list(self) -> list[Info]:
        """Returns the checkpoints that this process can see, oldest first; damaged ones have `ok=False`."""
        self._settle()
        return self.folder.list()

    def latest(self) -> Info | None:
        """Returns the newest good checkpoint, or None."""
        return next(iter(self.folder.ranking("latest", self.list())), None)

    def best(self) -> Info | None:
        """Returns the good checkpoint with the best value of `best` (the newer of equals), or None."""
        return next(iter(self.folder.ranking("best", self.list())), None)

    # -- restoring -------------------------------------------------------------------------------------------
    def restore(self, state: Mapping[str, Part], *, which: str | os.PathLike[str] = "latest") -> Progress | None:
        """Loads one checkpoint on every rank and returns its progress, or None if there is no checkpoint; collective.

        Rank 0 chooses the checkpoint, and sends it to ranks that cannot see it.

        Args:
            state: file name to the part that loads its content; other files of the checkpoint are ignored.
            which: "latest", "best", or the path of one checkpoint.

        Raises:
            CheckpointError: no checkpoint is good, the one at `which` is not, none has the metric of "best", it lacks a
                file that `state` names, or a rank could not load it. If rank 0 failed, others raise `MainRankError`.
        """
        progress = self._restore(state, os.fspath(which))
        if progress is not None:
            remember(self, state)
        return progress

    @repeated
    def _restore(self, state: Mapping[str, Part], which: str) -> Progress | None:
        chosen = self.world.on_main(self._choose, which, sorted(state))
        if chosen is None:
            if self.world.is_main:
                note = f"hvdtrain: {self.directory} holds no checkpoint: training starts from the beginning"
                print(note, file=sys.stderr, flush=True)
            return None
        name, manifest = chosen
        # every rank looks in its own directory: paths may differ between hosts, names do not
        path = self.directory / name if which in ("latest", "best") else Path(which)
        files = {name: manifest["files"][name] for name in sorted(state)}
        with local_copy(self.world, path, files) as (folder, failure):
            self._load(state, folder, failure)
        progress = Progress(**manifest["progress"])
        if path.parent == self.directory:
            _TRAININGS[self._place] = manifest.get("training", "")
            self._note_trained(state)
        for part in state.values():
            part.restored(progress)
        return progress

    def _choose(self, which: str, names: Sequence[str]) -> tuple[str, dict[str, Any]] | None:
        """Returns the name and manifest of the checkpoint to restore, every checksum read."""
        writer = running()
        if writer is not None:
            writer.wait()  # of all: a path may be of another directory
        if which in ("latest", "best"):
            known = self.folder.list()
            ranking = self.folder.ranking(which, known)
            if not known:
                return None
        else:
            known = ranking = [read_info(Path(which))]
        unusable = {info.path: info for info in known if not info.ok}
        for info in ranking:
            try:
                manifest = read_manifest(info.path)
                verify(info.path, manifest["files"])
            except (OSError, HvdtrainError) as error:
                unusable[info.path] = unusable_info(info, error)
                continue
            _check_has(manifest, names, info.path)
            _report_fallback(info, unusable.values())
            return info.path.name, manifest
        if which == "best" and not unusable:
            raise CheckpointError(
                f'which="best" needs a checkpoint with a finite {self.folder.best_metric}',
                f"none of {len(known)} checkpoint(s) in {self.directory} has a finite {self.folder.best_metric}",
                'restore which="latest", or give save() that metric',
            )
        raise CheckpointError(
            "restore() needs a checkpoint that is complete and readable",
            "\n".join(f"{path}: {info.problem}" for path, info in unusable.items()),
            "give another checkpoint or directory; to train from the beginning, move this directory away",
            code=40,
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
            raise failure  # every rank has the same error: once is enough
        if any(reports):
            raise CheckpointError(
                "every rank must be able to load the checkpoint",
                "\n".join(f"rank {rank}: {report}" for rank, report in enumerate(reports) if report),
                "the model, optimizer or versions may not be those that saved it",
                shared=True,
            ) from failure


class SaveEvent:
    """The event of one save in the run's record; written when training has continued and the save has ended."""

    def __init__(self, run: RunLog, progress: Progress) -> None:
        self._run, self._began = run, time.perf_counter()
        self._fields: dict[str, Any] = {"step": progress.step, "epoch": progress.epoch}
        self._lock = threading.Lock()

    def went_on(self, wait: Callable[[], object]) -> None:
        """Notes that training continues; `wait()` waits until the checkpoint is there."""
        self._run.before_end(wait)
        self._note(blocked_s=time.perf_counter() - self._began)

    def ended(self, path: Path | None) -> None:
        """Notes that the checkpoint is complete, or (None) that it failed; any thread may call it."""
        known: dict[str, Any] = {"sealed_s": None}
        if path is not None:
            try:
                size = sum(sealed["bytes"] for sealed in read_manifest(path)["files"].values())
                known = {"sealed_s": time.perf_counter() - self._began, "bytes": size, "path": path.name}
            except (OSError, HvdtrainError) as error:  # a newer one may have replaced it, or its disk be gone
                print(f"hvdtrain: the run's record lacks {path}: {error}", file=sys.stderr, flush=True)
        self._note(**known)

    def _note(self, **known: Any) -> None:
        with self._lock:
            self._fields |= known
            if not {"blocked_s", "sealed_s"} <= self._fields.keys():
                return
        self._run.checkpoint(self._fields)


def _report_fallback(chosen: Info, unusable: Iterable[Info]) -> None:
    """Prints which unusable checkpoints would have been chosen before `chosen`."""
    newer = [  # saved later, or maybe: a run that went back to an earlier step saves lower ones
        info
        for info in unusable
        if info.progress.step >= chosen.progress.step or not 0 < info.sequence < chosen.sequence
    ]
    for info in newer:
        print(f"hvdtrain: skipping the unusable checkpoint {info.path}: {info.problem}", file=sys.stderr)
    if newer:
        print(f"hvdtrain: falling back to {chosen.path}, the last good one", file=sys.stderr, flush=True)


def _check_has(manifest: dict[str, Any], names: Sequence[str], path: Path) -> None:
    missing = sorted(set(names) - set(manifest["files"]))
    if missing:
        raise CheckpointError(
            "a checkpoint must have every file that is to be restored",
            f"{path} lacks {', '.join(missing)}; it has {', '.join(sorted(manifest['files']))}",
            "restore with the same framework, and the same kind of model and optimizer, that saved it",
        )
