"""What this rank says of itself when others wait for it: its threads' stacks, and whether its main thread moves on.

Nothing is looked at while a rank gets along. When it has been in one place for some seconds its watch thread looks,
once a second, at the chain of functions that the main thread is in (the functions, not their lines):

still    the chain is the same in nine of ten looks, of the newest: those of the time that others may have to wait
circles  it changes, among chains that were all seen in the first half of the time since the place was left
moving   the second half has chains that are new
"""

from __future__ import annotations

import linecache
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from hvdtrain.core.in_step.lines import is_users, user_line
from hvdtrain.core.in_step.link import Meeting
from hvdtrain.core.in_step.meeting import Tracker
from hvdtrain.core.in_step.ring import RUN_VARIABLE, open_ring

STILL, CIRCLES, MOVING = "still", "circles", "moving"
Chain = tuple[tuple[str, str], ...]
_PAUSE_S = 5.0  # without a tick: the process or the machine was stopped, and nobody waited
_PAGE_S = 1.0
_FRAMES, _THREADS, _LINE = 100, 50, 160  # that are told at most
_DEBUGGERS = ("pdb", "bdb", "ipdb", "pudb", "debugpy", "pydevd", "_pydevd_bundle")
# modules that are on the stack while a framework compiles, and not when it runs what it has compiled
_COMPILERS = (
    "torch._dynamo.convert_frame", "torch._dynamo.output_graph", "torch._inductor.compile_fx",
    "torch._inductor.graph", "torch._inductor.scheduler", "torch._inductor.codecache", "torch._inductor.async_compile",
    "tensorflow.python.eager.polymorphic_function.tracing_compilation", "tensorflow.python.framework.func_graph",
)  # fmt: skip


class Looks:
    """Looks at the chain of functions that the main thread is in, since this rank came to where it is.

    Args:
        window_s: what counts as the newest looks.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._every_s = window_s / 30
        self._place: object = None
        self._since = time.monotonic()
        self._seen: list[tuple[float, int]] = []

    def idle_s(self, place: object, now: float) -> float:
        """Looks if it is time to; returns for how long the rank has been at `place`."""
        if place != self._place:
            self._place, self._since, self._seen = place, now, []
        elif now - (self._seen[-1][0] if self._seen else self._since) >= self._every_s:
            self._seen.append((now, hash(chain_of(main_frame()))))
        return now - self._since

    @property
    def movement(self) -> str:
        """How the thread moves."""
        return movement(self._seen, self._window_s)


def movement(looks: Sequence[tuple[float, int]], window_s: float) -> str:
    """Returns how a thread moves, of which (time, chain) were seen; pure."""
    recent = [chain for at, chain in looks if at > looks[-1][0] - window_s]
    if len(recent) < 3 or Counter(recent).most_common(1)[0][1] >= 0.9 * len(recent):
        return STILL
    middle = (looks[0][0] + looks[-1][0]) / 2
    before = {chain for at, chain in looks if at <= middle}
    return CIRCLES if all(chain in before for _, chain in looks) else MOVING


def chain_of(frame: FrameType | None) -> Chain:
    """Returns the functions that a frame is in, innermost first."""
    return tuple((each.f_code.co_filename, each.f_code.co_qualname) for each in _outwards(frame))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def main_frame() -> FrameType | None:
    """Returns where the main thread is."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def stacks(*, all_threads: bool = True) -> list[dict[str, Any]]:
    """Returns the stacks of this process' threads, the main thread's first; frames outermost first."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    order = sorted(frames, key=lambda ident: ident != main)[: _THREADS if all_threads else 1]
    return [
        {"thread": names.get(ident, str(ident)), "main": ident == main,
         "frames": [_told(frame) for frame in list(_outwards(frames[ident]))[:_FRAMES]][::-1]}
        for ident in order
    ]  # fmt: skip


def _told(frame: FrameType) -> dict[str, Any]:
    code = frame.f_code
    text = linecache.getline(code.co_filename, frame.f_lineno, frame.f_globals).strip()
    return {"file": code.co_filename, "line": frame.f_lineno, "function": code.co_qualname,
            "text": text[:_LINE], "user": is_users(frame)}  # fmt: skip


def debugger() -> str:
    """Returns how this process is being looked into by somebody, "" if it is not."""
    for frame in sys._current_frames().values():
        for each in _outwards(frame):
            module = str(each.f_globals.get("__name__") or "").partition(".")[0]
            if module in _DEBUGGERS:
                return f"a debugger ({module}) is on the stack"
            if each.f_trace is not None:
                return "a debugger traces its functions"
    if sys.gettrace() is not None or threading.gettrace() is not None:
        return "a debugger traces its threads"
    tracer = proc_status(os.getpid()).get("TracerPid", "0")
    return f"process {tracer} traces it" if tracer != "0" else ""


def compiles() -> bool:
    """Returns whether the main thread is in a framework's compiler."""
    return any(str(frame.f_globals.get("__name__") or "").startswith(_COMPILERS) for frame in _outwards(main_frame()))


def proc_status(pid: int) -> dict[str, str]:
    """Returns what the kernel says of a process: State, TracerPid ...; {} where it is gone, or not to be seen."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


class Ticks:
    """Says since when this process has run without a pause: one that was stopped, or its machine, was not waiting."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._last = self.awake_since = time.monotonic()

    def tick(self) -> float:
        """To be called all the time; returns the time."""
        now = time.monotonic()
        if now - self._last > self._gap_s:
            self.awake_since = now
        self._last = now
        return now


class Own:
    """What the watch of a rank knows of this rank.

    Args:
        tracker: where this rank is.
        meeting: rank 0's.

    Attributes:
        hang_s, token: of the meeting.
        run_dir: where reports and pages are left; None: not known.
    """

    def __init__(self, tracker: Tracker, meeting: Meeting) -> None:
        self._tracker, self.hang_s, self.token = tracker, meeting.hang_s, meeting.token
        self._ticks, self._looks = Ticks(_PAUSE_S), Looks(meeting.hang_s)
        self._who = {"rank": tracker.rank, "host": socket.gethostname(), "pid": os.getpid()}
        self.run_dir: Path | None = None
        self._next_page = 0.0
        self.use_run_dir(Path(os.environ[RUN_VARIABLE]) if os.environ.get(RUN_VARIABLE) else None)

    def use_run_dir(self, run_dir: Path | None) -> None:
        """Leaves this rank's page, and on rank 0 the report of a hang, in this folder from here on."""
        earlier, self.run_dir = self._tracker.ring, run_dir
        new = open_ring(run_dir, self.token, self._tracker.rank) if self.hang_s else None
        self._tracker.ring = new or earlier
        if new is not None and earlier is not None and new.path != earlier.path:
            earlier.remove()
        self._next_page = 0.0

    def close(self) -> None:
        """Ends the page."""
        ring, self._tracker.ring = self._tracker.ring, None
        if ring is not None:
            ring.remove()

    def tick(self) -> float:
        """Notes how this rank gets along; returns for how long it has been where it is."""
        now = self._ticks.tick()
        if not self.hang_s:
            return 0.0
        idle_s = self._looks.idle_s(self._tracker.standing(), now)
        ring = self._tracker.ring
        if ring is not None and now >= self._next_page:
            self._next_page = now + _PAGE_S
            line = user_line(main_frame()) if idle_s >= _PAGE_S else ""
            phase, on_main = self._tracker.phase(), self._tracker.on_main_now
            ring.tell({**self._who, "phase": phase, "on_main": on_main, "idle_s": round(idle_s, 1), "line": line})
        return idle_s

    def report(self, *, full: bool) -> dict[str, Any]:
        """Returns what this rank says of itself (see `hang.Report`); full: with the stacks of all threads."""
        now = time.monotonic()
        return {
            **self._who, **self._tracker.doing(), "idle_s": self._looks.idle_s(self._tracker.standing(), now),
            "awake_s": now - self._ticks.awake_since, "movement": self._looks.movement,
            "compiles": compiles(), "debugger": debugger(), "stacks": stacks(all_threads=full),
        }  # fmt: skip
