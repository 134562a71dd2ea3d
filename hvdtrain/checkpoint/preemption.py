"""What is done once all ranks know that one was preempted: they save as they did last, and end.

How they come to know: `hvdtrain.watch.preemption`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NoReturn, Protocol

from hvdtrain.checkpoint.parts import Checkpoints, Part, Saver
from hvdtrain.core.errors import (
    PREEMPTED_CODE,
    Preempted,
)
from hvdtrain.world.world import World


class Training(Protocol):
    """What trains on a loader's batches.

    Attributes:
        told: all ranks know that one was preempted.
        saver: what saves it.
    """

    @property
    def told(self) -> bool: ...
    @property
    def saver(self) -> Saver | None: ...


def remember(checkpointer: Checkpoints, state: Mapping[str, Part], *, saved: bool = True) -> None:
    """Notes in what trains how it is saved."""
    saver = Saver(checkpointer, state, saved=saved)
    for part in state.values():
        part.saved_by(saver)


def end_if_told(trainings: Iterable[Training], world: World) -> None:
    """Saves, and raises Preempted on every rank, if all ranks know of a preemption; collective then."""
    found = list(trainings)
    if any(training.told for training in found):
        savers = {id(its.saver): its.saver for its in found if its.saver is not None}
        done = [saver.save() for saver in sorted(savers.values(), key=lambda saver: saver.order)]
        end(world, done, "checkpoints.on_preemption(state) of a Checkpointer, or a save() or restore() before")


def end(world: World, done: Iterable[str], remedy: str) -> NoReturn:
    """Reports what was saved (or how to save), and raises Preempted on every rank; collective."""
    world.barrier()
    if world.is_main:
        said = "; ".join(dict.fromkeys(done)) or f"nothing was saved, which takes {remedy}"
        print(f"hvdtrain: preempted: {said}; exit code {PREEMPTED_CODE}", flush=True)
    raise Preempted
