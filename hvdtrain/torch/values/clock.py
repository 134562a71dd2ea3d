"""Where the time of a step goes: at any time exactly one phase runs, so the phases sum to the wall time.

On a GPU the phases are taken on its own time line: an event is recorded at each change, and the time between two
events is what the GPU spent on (or waited for) the phase between them. Nothing is waited for: intervals whose events
have not happened yet are counted by a later `take`.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from hvdtrain.record import clock

# if nothing reads the times, they are added up now and then, so that events do not pile up
_MOST_EVENTS = 1024


class TorchClock(clock.Clock):
    """The clock of phases, which can measure on a GPU; one for the process (`CLOCK`), for the thread that trains."""

    _gpu: _GpuLine | None = None

    def use(self, device: torch.device) -> None:
        """Measures on this device's time line from now on."""
        self.enter(self._phase)
        self._gpu = _GpuLine(device, self._phase) if device.type == "cuda" else None

    def _change(self, before: str) -> None:
        if self._gpu is None:
            super()._change(before)
        elif self._phase != before:
            self._gpu.enter(self._phase, self._seconds)

    def take(self) -> dict[str, float]:
        """Returns the seconds of each phase since the last call, up to now; on a GPU, up to what it has done."""
        if self._gpu is not None:
            self._gpu.measure(self._seconds)
        return super().take()


class _GpuLine:
    """CUDA events at the changes of phase, oldest first."""

    def __init__(self, device: torch.device, phase: str) -> None:
        self._device = device
        self._spare: list[Any] = []
        self._open: deque[tuple[str, Any]] = deque()
        self.enter(phase, {})

    def enter(self, phase: str, seconds: dict[str, float]) -> None:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._open.append((phase, event))
        if len(self._open) > _MOST_EVENTS:
            self.measure(seconds)

    def measure(self, seconds: dict[str, float]) -> None:
        """Adds the intervals that are over, and forgets them."""
        while len(self._open) > 1 and self._open[1][1].query():
            phase, start = self._open.popleft()
            seconds[phase] = seconds.get(phase, 0.0) + start.elapsed_time(self._open[0][1]) / 1e3
            self._spare.append(start)


CLOCK = TorchClock()
