"""What is done once all ranks know that one was preempted: they save as they did last, and end.

How they come to know: `hvdtrain.watch.preemption`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn, Protocol

from hvdtrain.checkpoint.parts import Part, Progress, Saves
from hvdtrain.core.errors import (
    PREEMPTED_CODE,
    CheckpointError,
    HvdtrainError,
    MainRankError,
    Preempted,
    describe,
)
from hvdtrain.world.world import World


class Checkpoints(Protocol):
    """A `Checkpointer`."""

    directory: Path

    def save(self, state: Mapping[str, Part], *, progress: Progress) -> Path: ...
    def wait(self) -> None: ...


class Training(Protocol):
    """What trains on a loader's batches.

    Attributes:
        told: all ranks know that one was preempted.
        saver: what saves it.
    """

    @property
    def told(self) -> bool: ...
    @property
    def saver(self) -> Saves | None: ...


class Saver:
    """Saves once more what a checkpointer was given; holds nothing that the user may drop.

    Args:
        checkpointer: which was given it.
        state: file name to what goes into it.
        saved: it has just been saved, or restored.
    """

    def __init__(self, checkpointer: Checkpoints, state: Mapping[str, Part], *, saved: bool) -> None:
        self.checkpointer = checkpointer
        self._makers = {name: part.again() for name, part in state.items()}
        self._saved_at = _progress_of(state) if saved else None

    @property
    def order(self) -> str:
        """The same on every rank."""
        return str(self.checkpointer.directory)

    def parts(self) -> dict[str, Part]:
        """Returns what is saved, made anew."""
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
    """Says that an earlier checkpoint was lost, after which all ranks save once more: a job that ends has no next save.

    Raises:
        HvdtrainError: it is another error.
    """
    lost = error.error_type if isinstance(error, MainRankError) else type(error).__name__
    if lost != CheckpointError.__name__:
        raise error
    if isinstance(error, CheckpointError):  # rank 0
        print(describe("hvdtrain", error, 0), file=sys.stderr, flush=True)


def _progress_of(state: Mapping[str, Part]) -> Progress:
    return next((found for part in state.values() if (found := part.progress) is not None), Progress())


def remember(checkpointer: Checkpoints, state: Mapping[str, Part], *, saved: bool = True) -> None:
    """Notes in what trains how it is saved."""
    saver = Saver(checkpointer, state, saved=saved)
    for part in state.values():
        part.saved_by(saver)


def end_if_told(trainings: Iterable[Training], world: World) -> None:
    """Saves and ends where all ranks know that one was told to; collective then.

    Raises:
        Preempted: on every rank.
    """
    found = list(trainings)
    if any(training.told for training in found):
        savers = {id(its.saver): its.saver for its in found if its.saver is not None}
        done = [saver.save() for saver in sorted(savers.values(), key=lambda saver: saver.order)]
        end(world, done, "checkpoints.on_preemption(state) of a Checkpointer, or a save() or restore() before")


def end(world: World, done: Iterable[str], remedy: str) -> NoReturn:
    """Says what has been saved (or else how it would have been), and ends on all ranks at once; collective.

    Raises:
        Preempted: on every rank.
    """
    world.barrier()
    if world.is_main:
        said = "; ".join(dict.fromkeys(done)) or f"nothing was saved, which takes {remedy}"
        print(f"hvdtrain: preempted: {said}; exit code {PREEMPTED_CODE}", flush=True)
    raise Preempted
