"""Where the time of a run goes: at any time exactly one phase runs, so the phases sum to the wall time."""

from __future__ import annotations

import time
from collections.abc import Callable

from hvdtrain.core.errors import ConfigError
from hvdtrain.record.bottleneck import BETWEEN, STEP

PHASES = (*STEP, *BETWEEN)


class Clock:
    """A state machine of phases, for the thread that trains."""

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
