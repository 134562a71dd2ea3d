"""The parts of a checkpoint: what each one does, and the part that holds objects of the user's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from hvdtrain.checkpoint.staging import StateFile
from hvdtrain.core.errors import (
    PREEMPTED_CODE,
    CheckpointError,
    ConfigError,
    HvdtrainError,
    MainRankError,
    Preempted,
    describe,
)
from hvdtrain.world.world import World


@dataclass(frozen=True)
class Progress:
    """The progress of training; counts are of all ranks together.

    Attributes:
        epoch: the epoch to continue with, counted from 0.
        step: updates done.
        samples_seen: samples since the start of training.
        samples_in_epoch: samples done in `epoch`.
    """

    epoch: int = 0
    step: int = 0
    samples_seen: int = 0
    samples_in_epoch: int = 0


class Part:
    """A file of a checkpoint."""

    def collect(self) -> None:
        """Collects the state that rank 0 writes; called on every rank before `write`, may be collective.

        Raises:
            HvdtrainError: the state is not worth keeping, or cannot be restored exactly.
        """

    def write(self, file: StateFile) -> None:
        """Writes the state; called on rank 0, while training waits."""
        raise NotImplementedError

    def check(self, path: Path) -> None:
        """Raises CheckpointError if `load` cannot take the file; called on every rank for all parts before any load."""

    def load(self, path: Path) -> None:
        """Takes the state from `path`; called on every rank, with the same content."""
        raise NotImplementedError

    def restored(self, progress: Progress) -> None:
        """Reacts to the load of all parts; called on every rank, with the progress that was saved with them."""

    # -- when the job is preempted ---------------------------------------------------------------------------------
    @property
    def progress(self) -> Progress | None:
        """The progress of the training that this part belongs to; None if unknown."""
        return None

    def again(self) -> Callable[[], Part]:
        """Returns a function that makes this part again, and that does not hold what trains."""
        return lambda: self

    @property
    def trained(self) -> object | None:
        """The model whose training this part belongs to; None if unknown."""
        return None

    def saved_by(self, saver: Saver) -> None:
        """Notes the saver of the state that this part belongs to; a checkpointer calls it on every rank."""


class Checkpoints(Protocol):
    """A `Checkpointer`."""

    directory: Path

    def save(self, state: Mapping[str, Part], *, progress: Progress) -> Path: ...
    def wait(self) -> None: ...


class Saver:
    """Saves again what a checkpointer was given (`saved`: just now, or restored); holds nothing that trains."""

    def __init__(self, checkpointer: Checkpoints, state: Mapping[str, Part], *, saved: bool) -> None:
        self.checkpointer = checkpointer
        self._makers = {name: part.again() for name, part in state.items()}
        self._saved_at = _progress_of(state) if saved else None

    @property
    def order(self) -> str:
        """A key that orders savers; it is the same on every rank."""
        return str(self.checkpointer.directory)

    def parts(self) -> dict[str, Part]:
        """Returns the parts to save, made again."""
        return {name: make() for name, make in self._makers.items()}

    def save(self) -> str:
        """Saves, unless that was done after the last update; returns what is there, in words. Collective."""
        try:
            return self._save()
        except HvdtrainError as error:
            tell_if_lost(error)
            self._saved_at = None
            return self._save()

    def _save(self) -> str:
        state = self.parts()
        progress = _progress_of(state)
        if progress == self._saved_at:
            self.checkpointer.wait()
            return f"what it has learned is in {self.checkpointer.directory}"
        path = self.checkpointer.save(state, progress=progress)
        self.checkpointer.wait()
        return f"saved in {path}"


def tell_if_lost(error: HvdtrainError) -> None:
    """Reports that an earlier checkpoint was lost, after which all ranks save again; raises any other error."""
    lost = error.error_type if isinstance(error, MainRankError) else type(error).__name__
    if lost != CheckpointError.__name__:
        raise error
    if isinstance(error, CheckpointError):  # rank 0
        print(describe("hvdtrain", error, 0), file=sys.stderr, flush=True)


def _progress_of(state: Mapping[str, Part]) -> Progress:
    return next((found for part in state.values() if (found := part.progress) is not None), Progress())


class Training(Protocol):
    """A training on a loader's batches; `preempted` is True if all ranks know of a preemption, `saver` saves it."""

    @property
    def preempted(self) -> bool: ...
    @property
    def saver(self) -> Saver | None: ...


def remember(checkpointer: Checkpoints, state: Mapping[str, Part], *, saved: bool = True) -> None:
    """Notes in what trains how it is saved."""
    saver = Saver(checkpointer, state, saved=saved)
    for part in state.values():
        part.saved_by(saver)


def end_if_preempted(trainings: Iterable[Training], world: World) -> None:
    """Saves, and raises Preempted on every rank, if all ranks know of a preemption; collective then."""
    found = list(trainings)
    if any(training.preempted for training in found):
        savers = {id(its.saver): its.saver for its in found if its.saver is not None}
        done = [saver.save() for saver in sorted(savers.values(), key=lambda saver: saver.order)]
        end(world, done, "checkpoints.on_preemption(state) of a Checkpointer, or a save() or restore() before")


def end(world: World, done: Iterable[str], remedy: str) -> NoReturn:
    """Reports what was saved (or how to save), and raises Preempted on every rank; collective."""
    world.barrier()
    if world.is_main:
        saved = "; ".join(dict.fromkeys(done)) or f"nothing was saved, which takes {remedy}"
        print(f"hvdtrain: preempted: {saved}; exit code {PREEMPTED_CODE}", flush=True)
    raise Preempted


class ExtraPart(Part):
    """Objects beside model and optimizer (averages of weights, schedulers, counters), as rank 0 has them.

    Args:
        extra: name to an object with `state_dict` and `load_state_dict`, or to a plain value: numbers, text, arrays,
            tensors, and dicts, lists and tuples of those. A restore loads objects, arrays and tensors in place, and
            puts other values into `extra`.
    """

    def __init__(self, extra: MutableMapping[str, Any]) -> None:
        if not isinstance(extra, MutableMapping) or not all(isinstance(name, str) for name in extra):
            raise ConfigError(
                "extra= must be a dict from names to the objects that a checkpoint stores",
                f"{type(extra).__name__}: {extra!r:.100}",
                'extra={"ema": ema, "scheduler": scheduler}',
            )
        self.extra = extra

    def state_of(self, value: Any) -> Any:
        """Returns the state to save of one object."""
        return value.state_dict() if hasattr(value, "state_dict") else value

    def put_back(self, value: Any, saved: Any) -> Any:
        """Loads one object; returns what takes its place."""
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(saved)
            return value
        return saved

    def states(self) -> dict[str, Any]:
        return {name: self.state_of(value) for name, value in self.extra.items()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Loads every object; raises CheckpointError, naming it, for one that is missing or does not fit."""
        missing = sorted(self.extra.keys() - saved.keys())
        if missing:
            raise CheckpointError(
                "a checkpoint must have everything that extra= names",
                f"it lacks {', '.join(missing)}; it has {', '.join(sorted(saved)) or 'nothing'}",
                "remove what the saved run did not have",
            )
        for name, value in list(self.extra.items()):
            try:
                self.extra[name] = self.put_back(value, saved[name])
            except Exception as error:
                raise CheckpointError(
                    f"what was saved as extra[{name!r}] must fit the {type(value).__name__} that takes it",
                    f"{type(error).__name__}: {error}",
                    "make it as the run did that saved it",
                ) from error
