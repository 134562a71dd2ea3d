"""Where the time of a step goes: at any time exactly one phase runs, so the phases sum to the wall time.

On a GPU the phases are taken on its own time line: an event is recorded at each change, and the time between two
events is what the GPU spent on (or waited for) the phase between them. Nothing is waited for: intervals whose events
have not happened yet are counted by a later `take`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.core.errors import ConfigError

PHASES = ("input", "forward", "backward", "communication", "optimizer", "checkpoint", "evaluation", "other")

# where nobody takes the times, they are added up here and there, so that events do not pile up
_MOST_EVENTS = 1024


class Clock:
    """A state machine of phases; one for the process (`CLOCK`), for the thread that trains."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._phase = "other"
        self._since = now()
        self._seconds: dict[str, float] = {}
        self._gpu: _GpuLine | None = None

    @property
    def phase(self) -> str:
        """The phase that runs."""
        return self._phase

    def use(self, device: torch.device) -> None:
        """Measures on this device's time line from now on."""
        self.enter(self._phase)
        self._gpu = _GpuLine(device, self._phase) if device.type == "cuda" else None

    def enter(self, phase: str) -> str:
        """Ends the running phase and starts `phase`; returns the one that ended.

        Raises:
            ConfigError: not one of `PHASES`.
        """
        if phase not in PHASES:
            raise ConfigError(f"the phases are {', '.join(PHASES)}", repr(phase))
        before, self._phase = self._phase, phase
        if self._gpu is not None:
            if phase != before:
                self._gpu.enter(phase)
            return before
        now = self._now()
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._since = now
        return before

    def take(self) -> dict[str, float]:
        """Returns the seconds of each phase since the last call, up to now; on a GPU, up to what it has done."""
        self.enter(self._phase)
        if self._gpu is not None:
            self._gpu.add_to(self._seconds)
        taken, self._seconds = self._seconds, {}
        return taken


class _GpuLine:
    """CUDA events at the changes of phase, oldest first."""

    def __init__(self, device: torch.device, phase: str) -> None:
        self._device = device
        self._spare: list[Any] = []
        self._seconds: dict[str, float] = {}
        self._open: deque[tuple[str, Any]] = deque()
        self.enter(phase)

    def enter(self, phase: str) -> None:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._open.append((phase, event))
        if len(self._open) > _MOST_EVENTS:
            self._measure()

    def add_to(self, seconds: dict[str, float]) -> None:
        """Adds the intervals that are over, and forgets them."""
        self._measure()
        for phase, value in self._seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + value
        self._seconds = {}

    def _measure(self) -> None:
        while len(self._open) > 1 and self._open[1][1].query():
            phase, start = self._open.popleft()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + start.elapsed_time(self._open[0][1]) / 1e3
            self._spare.append(start)


CLOCK = Clock()
