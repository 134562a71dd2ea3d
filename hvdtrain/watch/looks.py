"""A rank's report on itself when others wait for it: its threads' stacks, and whether its main thread makes progress.

The watch thread takes no samples while a rank makes progress. Once a rank has been in one place for some seconds, it
samples the main thread's chain of functions (the functions, not their lines) once a second:

still    the chain is the same in all but one of the newest samples: those within the hang time
circles  it changes among chains that were all seen in the first half of the time at this place; or it stays the same,
         and the process reads or writes much
moving   the second half has chains that are new
"""

from __future__ import annotations

import atexit
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
from typing import Any, NamedTuple

from hvdtrain.comm.lines import is_users, line_of, user_line
from hvdtrain.comm.link import Meeting
from hvdtrain.comm.ring import forget, open_ring
from hvdtrain.core import variables
from hvdtrain.core.version import qualified_name
from hvdtrain.watch.meeting import Tracker

STILL, CIRCLES, MOVING = "still", "circles", "moving"
Chain = tuple[tuple[str, str], ...]
_PAUSE_S = 5.0  # without a tick: the process or the machine was stopped, and nobody waited
_PAGE_S = 1.0
_FRAMES, _THREADS, _LINE = 100, 50, 160  # in a report at most
_DEBUGGERS = ("pdb", "bdb", "ipdb", "pudb", "debugpy", "pydevd", "_pydevd_bundle")
# What may take long, by modules (and functions: all of them, where none is named) that are on the stack meanwhile;
# what a compiler has made runs without those of it that are named here
_LONG_TASKS = {
    "compiles": (
        "torch._dynamo.convert_frame", "torch._dynamo.output_graph", "torch._inductor.compile_fx",
        "torch._inductor.graph", "torch._inductor.scheduler", "torch._inductor.codecache",
        "torch._inductor.async_compile", "tensorflow.python.framework.func_graph",
    ),
    "saves or loads": (
        "torch.serialization", "torch.hub", "safetensors", "keras.src.saving", "tensorflow.python.saved_model",
        "tensorflow.python.checkpoint", "h5py", "pickle", "shutil", "zipfile", "tarfile", "urllib", "http.client",
        "subprocess",
    ),
    "evaluates": (
        "keras.src.backend.tensorflow.trainer:evaluate:predict", "keras.src.backend.torch.trainer:evaluate:predict",
    ),
}  # fmt: skip
_MUCH = 16 << 20  # bytes read or written, while others may have to wait
# what calls the user's code in the middle of an update: in the main thread, and where Keras' steps ask for their data
_CALLERS = ("hvdtrain.torch", "hvdtrain.keras")
_FEEDERS = ("hvdtrain.keras.data", "keras.src.trainers.data_adapters", "tensorflow.python")


class StackSample(NamedTuple):
    """A sample at a time: the chain as a number, and the bytes that the process had read and written."""

    at: float
    chain: int
    moved: int = 0


class Looks:
    """Samples the functions that the main thread is in, since this rank came to its present place."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._every_s = window_s / 30
        self._place: object = None
        self._since = time.monotonic()
        self._seen: list[StackSample] = []

    def idle_s(self, place: object, now: float) -> float:
        """Takes a sample if one is due; returns for how long the rank has been at `place`."""
        if place != self._place:
            self._place, self._since, self._seen = place, now, []
        elif now - (self._seen[-1][0] if self._seen else self._since) >= self._every_s:
            self._seen.append(StackSample(now, hash(chain_of(main_frame())), bytes_moved()))
        return now - self._since

    @property
    def movement(self) -> str:
        """Returns the movement of the main thread: still, circles or moving."""
        return movement(self._seen, self._window_s)


def movement(looks: Sequence[StackSample], window_s: float) -> str:
    """Returns the movement of a thread from its samples; pure."""
    recent = [look for look in looks if look.at > looks[-1].at - window_s]
    most = Counter(look.chain for look in recent).most_common(1)
    if not most or len(recent) - most[0][1] <= 1:
        return CIRCLES if recent and recent[-1].moved - recent[0].moved > _MUCH else STILL
    middle = (looks[0].at + looks[-1].at) / 2
    before = {look.chain for look in looks if look.at <= middle}
    return CIRCLES if all(look.chain in before for look in looks) else MOVING


def bytes_moved() -> int:
    """Returns the bytes that this process has read and written so far; 0 if the kernel does not report them."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    except (OSError, ValueError):
        return 0


def chain_of(frame: FrameType | None) -> Chain:
    """Returns the functions that a frame is in, innermost first."""
    return tuple((each.f_code.co_filename, qualified_name(each.f_code)) for each in _outwards(frame))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def main_frame() -> FrameType | None:
    """Returns where the main thread is."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def called_back() -> int | None:
    """Returns the thread in the user's code that a library calls in an update (a hook, a data set), or None."""
    main = threading.main_thread().ident
    for ident, innermost in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        outwards = _outwards(innermost)
        for frame in outwards:
            if _module(frame).startswith("hvdtrain."):
                break
            if is_users(frame):
                callers = _CALLERS if ident == main else _FEEDERS
                if any(_module(outer).startswith(callers) for outer in outwards):
                    return ident
                break
    return None


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__") or "")


def stacks(first: int | None = None, *, all_threads: bool = True) -> list[dict[str, Any]]:
    """Returns the stacks of this process' threads, the main thread's or `first`'s first; frames outermost first."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    order = sorted(frames, key=lambda ident: (ident != first, ident != main))[: _THREADS if all_threads else 1]
    return [
        {"thread": names.get(ident, str(ident)), "main": ident == main,
         "frames": [_frame_facts(frame) for frame in list(_outwards(frames[ident]))[:_FRAMES]][::-1]}
        for ident in order
    ]  # fmt: skip


def _frame_facts(frame: FrameType) -> dict[str, Any]:
    code = frame.f_code
    number = line_of(frame)
    text = linecache.getline(code.co_filename, number, frame.f_globals).strip()
    return {"file": code.co_filename, "line": number, "function": qualified_name(code),
            "text": text[:_LINE], "user": is_users(frame)}  # fmt: skip


def debugger() -> str:
    """Returns how a debugger examines this process; "" without one."""
    for frame in sys._current_frames().values():
        for each in _outwards(frame):
            module = _module(each).partition(".")[0]
            if module in _DEBUGGERS:
                return f"a debugger ({module}) is on the stack"
            if _stops(each.f_trace):
                return "a debugger traces its functions"
    if _stops(sys.gettrace()) or _stops(threading.gettrace()):
        return "a debugger traces its threads"
    tracer = proc_status(os.getpid()).get("TracerPid", "0")
    return f"process {tracer} traces it" if tracer != "0" else ""


def _stops(trace: object) -> bool:
    """Returns True if a trace function may stop the program; coverage's only counts lines."""
    its = type(getattr(trace, "__self__", trace)).__module__
    return trace is not None and its.partition(".")[0] != "coverage"


def long_task() -> str:
    """Returns what the main thread is in that may take long, "" if it is in nothing of the kind."""
    for frame in _outwards(main_frame()):
        for task, places in _LONG_TASKS.items():
            for place in places:
                module, *functions = place.split(":")
                named = not functions or frame.f_code.co_name in functions
                if named and (_module(frame) == module or _module(frame).startswith(module + ".")):
                    return task
    return ""


def proc_status(pid: int) -> dict[str, str]:
    """Returns the kernel's facts on a process: State, TracerPid ...; {} if it has ended or cannot be read."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


class Ticks:
    """Measures since when this process has run without a pause: time suspended does not count as waiting."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._last = self.awake_since = time.monotonic()

    def tick(self) -> float:
        """Notes that this process runs, and returns the time; call it often: a gap means that it was suspended."""
        now = time.monotonic()
        if now - self._last > self._gap_s:
            self.awake_since = now
        self._last = now
        return now


class Own:
    """The knowledge of a rank's watch about its own rank; it writes reports and pages into `run_dir`."""

    def __init__(self, tracker: Tracker, meeting: Meeting) -> None:
        self._tracker, self.hang_s, self.token = tracker, meeting.hang_s, meeting.token
        self._ticks, self._looks = Ticks(_PAUSE_S), Looks(meeting.hang_s)
        self._who = {"rank": tracker.rank, "host": socket.gethostname(), "pid": os.getpid()}
        self.run_dir: Path | None = None
        self._next_page = 0.0
        atexit.register(self.close)  # a process that exits normally, with or without an error, has reported its end
        self.use_run_dir(Path(os.environ[variables.RUN_DIR]) if os.environ.get(variables.RUN_DIR) else None)

    def use_run_dir(self, run_dir: Path | None) -> None:
        """Writes this rank's page, and on rank 0 the report of a hang, into this folder from now on."""
        earlier, self.run_dir = self._tracker.ring, run_dir and run_dir.absolute()
        if self.run_dir is not None:
            forget(self.run_dir, self._tracker.rank, self._tracker.size, folder=not self.hang_s)
        new = open_ring(self.run_dir, self.token, self._tracker.rank) if self.hang_s else None
        if new is not None:
            new.tell(self._who)  # it may end within a second
        self._tracker.ring = new or earlier
        if new is not None and earlier is not None and new.path != earlier.path:
            earlier.remove()
        self._next_page = 0.0

    def close(self) -> None:
        """Ends the page."""
        atexit.unregister(self.close)
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
        """Returns this rank's report on itself (see `hang.Report`); full: with the stacks of all threads."""
        now, doing = time.monotonic(), self._tracker.doing()
        busy = called_back() if doing["at"] is not None else None
        if busy is not None:
            doing["at"] = None
        return {
            **self._who, **doing, "idle_s": self._looks.idle_s(self._tracker.standing(), now),
            "awake_s": now - self._ticks.awake_since, "movement": self._looks.movement,
            "task": long_task(), "debugger": debugger(), "stacks": stacks(busy, all_threads=full),
        }  # fmt: skip
