"""Where the time of a run goes: at any time exactly one phase runs, so the phases sum to the wall time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from hvdtrain.comm.engines import HorovodCollectives
from hvdtrain.core import variables
from hvdtrain.core.errors import ConfigError
from hvdtrain.record.bottleneck import BETWEEN, STEP
from hvdtrain.world.world import World

PHASES = (*STEP, *BETWEEN)
TIMELINE = "horovod-timeline.json"  # in the run's directory
Mark = tuple[float, str]  # when, in seconds since the epoch; the phase that began then, or "update N", which ended


class Clock:
    """A state machine of phases, for the thread that trains.

    Attributes:
        marks: where each change of phase is noted, for a trace; None: nowhere. Of whichever clock runs in this process:
            a run does not know the clock that its seconds come from.
    """

    marks: ClassVar[list[Mark] | None] = None

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._phase = "other"
        self._since = now()
        self._seconds: dict[str, float] = {}

    @property
    def phase(self) -> str:
        """The phase that runs."""
        return self._phase

    def enter(self, phase: str) -> str:
        """Ends the running phase and starts `phase`, one of `PHASES`; returns the one that ended."""
        if phase not in PHASES:
            raise ConfigError(f"phase must be one of {', '.join(PHASES)}", repr(phase))
        before, self._phase = self._phase, phase
        self._change(before)
        if Clock.marks is not None and phase != before:
            Clock.marks.append((round(time.time(), 6), phase))
        return before

    def _change(self, before: str) -> None:
        now = self._now()
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """Returns the seconds of each phase since the last call, up to now."""
        self.enter(self._phase)
        taken, self._seconds = self._seconds, {}
        return taken


def traced_updates(environ: Mapping[str, str]) -> int:
    """Returns how many updates `HVDTRAIN_TRACE` asks to trace; raises ConfigError if it is no number."""
    text = environ.get(variables.TRACE) or "0"
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{variables.TRACE} must be a number of updates", repr(text), f"{variables.TRACE}=200")
    return int(text)


class Tracing:
    """Notes the marks of a run's first updates; Horovod's timeline goes into `folder`, on rank 0."""

    def __init__(self, updates: int, world: World, folder: Path) -> None:
        self._left, self._engine = updates, world.comm
        self._timeline(folder / TIMELINE)
        self._marks: list[Mark] = []
        Clock.marks = self._marks

    def _timeline(self, path: Path | None) -> None:
        if isinstance(self._engine, HorovodCollectives):
            self._engine.record_timeline(path)

    def update(self, step: int) -> None:
        """Notes that an update was done."""
        if self._left:
            self._marks.append((round(time.time(), 6), f"update {step}"))
            self._left -= 1
            if not self._left:
                self._stop()

    def take(self) -> list[Mark]:
        """Returns the marks since the last call."""
        taken, self._marks = self._marks, []
        if self._left:
            Clock.marks = self._marks
        return taken

    def end(self) -> list[Mark]:
        """Ends it early, if it has not ended; returns what no `take` did."""
        if self._left:
            self._left = 0
            self._stop()
        return self.take()

    def _stop(self) -> None:
        self._timeline(None)
        Clock.marks = None
