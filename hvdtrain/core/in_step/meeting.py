"""Ranks in step: all of them are at the same collective operation, or each is told who is where.

An operation of the host (gather, barrier, a checkpoint's save ...) begins with a meeting: the ranks compare what they
are about to do, so that nothing pairs with something else. What no meeting can see, a rank that waits in the reduction
of a training step, or at its end, for ranks that are elsewhere, is found by `hvdtrain.core.in_step.watch`, which looks
at the notes that are kept here.
"""

from __future__ import annotations

import hashlib
import json
import linecache
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from hvdtrain.core.engines import Engine
from hvdtrain.core.errors import ConfigError, ReplicaError, by_rank
from hvdtrain.core.in_step.arrival import names_of

# frames of these are not the user's, who called them
_LIBRARIES = frozenset({"hvdtrain", "keras", "tensorflow", "torch", "deepspeed", "horovod"}) | sys.stdlib_module_names
END, BARRIER = "end", "barrier"  # may be reached on another line by each rank

# What a rank says about its place, as JSON: kind, number, key, text; and updates, meetings: how many it has completed.
State = Mapping[str, Any]


class Closes(Protocol):
    """What has an end."""

    def close(self) -> None: ...


@dataclass(slots=True)
class Place:
    """A collective operation that this rank is in.

    Attributes:
        kind: "update" (of training), or what is done at a meeting.
        number: of the update, or of the meeting, counted from 1.
        key: what else must be the same on all ranks; its text counts.
        line: the user's, as text; None: look for it in the thread's stack when it is asked for.
        within: the user's function with that line.
        receives: this rank gives nothing.
        agreed: every rank is known to be in it.
        since_s: when this rank came (time.monotonic).
        thread: that waits in it.
    """

    kind: str
    number: int
    key: object
    line: str | None = None
    within: str = ""
    receives: bool = False
    agreed: bool = False
    since_s: float = field(default_factory=time.monotonic)
    thread: int = field(default_factory=threading.get_ident)


class Tracker:
    """Where this rank is; what the others are told, and asked, about it.

    Args:
        rank, size: this process, and how many there are.
        on: False: nothing is compared or noted.

    Attributes:
        updates, meetings: completed so far; the same on every rank that is in step.
        longest_s: that this rank has been in one update.
        watch: ends with `close`.
        remedy: what to do when ranks are not in step, for programs that are not written with hvdtrain.
    """

    watch: Closes | None = None
    remedy = ""

    def __init__(self, rank: int = 0, size: int = 1, *, on: bool = True) -> None:
        self.rank, self.size = rank, size
        self.on = on and size > 1
        self.updates = self.meetings = 0
        self.longest_s = 0.0
        self._update: Place | None = None
        self._meeting: Place | None = None
        self._on_main = ""
        self._pid, self._left = os.getpid(), False

    def close(self) -> None:
        """Ends the watch; nothing is compared or noted any more."""
        self.on = False
        if self.watch is not None:
            self.watch.close()
            self.watch = None

    def leave(self) -> None:
        """Closes; what is collective is refused from here on."""
        self.close()
        self._left = self.size > 1

    # -- operations of the host ----------------------------------------------------------------------------------
    @contextmanager
    def meeting(
        self, comm: Engine, kind: str, key: str = "", value: float | None = None, *, receives: bool = False
    ) -> Iterator[float]:
        """Has the ranks compare what they are about to do, then lets them do it; collective.

        Operations within this one are not compared again: all ranks run the same code there.

        Args:
            comm: carries the comparison.
            kind: what is done.
            key: what else must be the same.
            value: is summed over the ranks on the way, and given; None: 0 is.
            receives: of a broadcast: this rank gives nothing, and may be on another line of the same function.

        Raises:
            ReplicaError: on every rank, with the line of each; or on rank 0, inside a function that it runs alone; or
                where another thread of this rank is in one.
            ConfigError: in a forked process, or when the world has been left.
        """
        self._refuse_elsewhere(kind)
        self._refuse_second_thread(kind)
        if not self.on or (self._meeting is not None and self._meeting.agreed):
            yield 0.0 if value is None else comm.sum_floats([value])[0]
            return
        name = kind if kind in (BARRIER, END) else kind + _in_thread()
        line = f"at the end of {os.path.basename(sys.argv[0]) or 'the program'}" if kind == END else user_line()
        place = self._meeting = Place(name, self.meetings + 1, key, line)
        place.within, place.receives = _function_of(_users_frame(sys._getframe(1))), receives
        try:
            total = self._compare(comm, place, value or 0.0)
            place.agreed = True
            yield total
        finally:
            self._meeting = None

    def _compare(self, comm: Engine, place: Place, value: float) -> float:
        line = "" if place.kind in (BARRIER, END) else (place.line or "").partition(": ")[0]
        words = repr((place.kind, place.number, place.key, line, self.updates)).encode()
        own = int.from_bytes(hashlib.blake2b(words, digest_size=6).digest(), "big")  # a float64 holds it exactly
        mine = [float(own) if rank == self.rank else 0.0 for rank in range(self.size)]
        *found, total = comm.sum_floats([*mine, value])
        self.meetings += 1
        if any(value != found[0] for value in found):
            report = {**self.state_of(place), "within": place.within, "receives": place.receives}
            states = [json.loads(state) for state in comm.allgather_bytes(json.dumps(report).encode())]
            if not _others_receive(states):
                raise out_of_step(states)
        return total

    @contextmanager
    def on_main(self, name: str) -> Iterator[None]:
        """While it lasts, rank 0 runs the function `name` alone, and the others wait for its result."""
        self._on_main = f"{name}, from {user_line()}"
        try:
            yield
        finally:
            self._on_main = ""

    def _refuse_second_thread(self, kind: str) -> None:
        """Which of two threads comes first differs from rank to rank: they would get each other's answers."""
        other = self._meeting
        if other is not None and other.thread != threading.get_ident() and self.on:
            raise ReplicaError(
                "one thread at a time may be in a collective operation: the ranks' threads would pair by chance",
                f"{kind}{_in_thread()}, {user_line()}\nwhile another thread is in {other.kind}, {other.line}",
                "call what is collective in one thread only",
            )

    def _refuse_elsewhere(self, kind: str) -> None:
        """Refuses what is collective where the other ranks are not: in a fork, after the end, in `on_main`."""
        if self.size > 1 and os.getpid() != self._pid:
            raise ConfigError(
                "what is collective belongs to the process that joined the ranks, not to one that was forked from it",
                f"{kind}, {user_line()}, in process {os.getpid()}, forked from {self._pid}",
                "call it in the program itself, and give its result to the workers (of a DataLoader, a Pool ...)",
            )
        if self._left:
            raise ConfigError(
                "what is collective must be done before the ranks part",
                f"{kind}, {user_line()}, after this rank has left its world",
                "call it inside of `with hvdtrain.init(...)`, before the program's end",
            )
        if self._on_main and self.on:
            raise ReplicaError(
                "a function that rank 0 runs alone must not call a collective operation: the other ranks are not in it",
                f"{kind}, {user_line()}\nin on_main({self._on_main})",
                "call it on every rank, outside of on_main(); only what is done with its result is for rank 0",
            )

    # -- training --------------------------------------------------------------------------------------------------
    def begin_update(self, key: object) -> None:
        """Notes that this rank is in the reduction of a training step; the next `begin_update` replaces it."""
        self._refuse_elsewhere("a training step")
        if self.on:
            self._update = Place("update", self.updates + 1, key)

    def end_update(self) -> None:
        """Notes that the reduction is complete."""
        if self._update is not None:
            self.longest_s = max(self.longest_s, time.monotonic() - self._update.since_s)
            self._update = None
            self.updates += 1

    def drop_update(self) -> None:
        """Notes that the step failed."""
        self._update = None

    @contextmanager
    def update(self, key: str) -> Iterator[None]:
        """`begin_update` and `end_update` around a whole step."""
        self.begin_update(key)
        try:
            yield
        except BaseException:
            self.drop_update()
            raise
        self.end_update()

    @contextmanager
    def reduction(self, key: str) -> Iterator[None]:
        """As `begin_update`, for a reduction within an update, such as batch norm's; it is not counted."""
        before = self._update
        if self.on and before is None:
            self._update = Place("update", self.updates + 1, key)
        try:
            yield
        finally:
            self._update = before

    @contextmanager
    def waiting(self, place: Place) -> Iterator[None]:
        """Notes that this rank waits in `place`, a meeting that is held by other means than `meeting`."""
        self._meeting = place if self.on else None
        try:
            yield
        finally:
            self._meeting = None

    # -- what is said about it -------------------------------------------------------------------------------------
    def stuck(self, after_s: float) -> State | None:
        """Returns where this rank has waited for `after_s` or longer; None while it is anywhere else.

        A rank that is known to have come together with all others is not stuck, however long it takes.
        """
        update, meeting = self._update, self._meeting
        if meeting is not None and meeting.agreed:
            return None
        place = update or meeting  # a meeting within an update is part of it
        if place is None or time.monotonic() - place.since_s < after_s:
            return None
        return self.state_of(place)

    def state_of_update(self, key: object) -> State:
        """Returns the state of a rank that has just completed an update, and found that it was not the others'."""
        return self.state_of(Place("update", self.updates, key, user_line()))

    def state_of(self, place: Place) -> State:
        line = place.line
        if line is None:
            line = user_line(sys._current_frames().get(place.thread))
        return {
            "kind": place.kind, "number": place.number, "key": str(place.key), "line": line,
            "updates": self.updates, "meetings": self.meetings,
        }  # fmt: skip


OFF = Tracker()


# -- pure ----------------------------------------------------------------------------------------------------------
def deadlocked(states: Sequence[State]) -> bool:
    """Whether ranks that all wait, each where its state says, wait for one another; pure.

    A rank does not wait in vain while every other one is in the same operation, or has completed it: then all have
    sent what it needs, and it is only slow to receive.
    """
    return all(any(_lacks(mine, other) for other in states) for mine in states)


def _lacks(mine: State, other: State) -> bool:
    training = mine["kind"] == "update"
    if training == (other["kind"] == "update") and mine["number"] == other["number"]:
        return training and mine["key"] != other["key"]  # at a meeting they compare that themselves
    return other["updates" if training else "meetings"] < mine["number"]


def _others_receive(states: Sequence[State]) -> bool:
    """Returns whether they only differ in `if is_main: broadcast(x)`, `else: broadcast(None)` of one function; pure."""
    first = states[0]
    same = ("kind", "number", "key", "updates", "within")
    if first["kind"].partition(" ")[0] != "broadcast" or any(s[name] != first[name] for s in states for name in same):
        return False
    root = states[int(first["key"])]
    return all(state["receives"] or state["line"] == root["line"] for state in states)


def out_of_step(states: Sequence[State], remedy: str = "") -> ReplicaError:
    """Returns the error that names where each rank is; pure. Without a remedy, that for programs of hvdtrain's."""
    return ReplicaError(
        "every rank must come to the same collective operation",
        by_rank(list(map(_described, states))),
        remedy
        or "call what is collective (evaluate, save, gather ...) on every rank, in the same order, on the same line:"
        " not under `if world.is_main:`;\nbreak and continue on every rank alike, and give every rank the same number"
        " of batches, as hvdtrain's loaders do",
        shared=True,
    )


def waiting(state: State, absent: Sequence[int], seconds: float) -> str:
    """Returns what rank 0 says, as `state` tells where it is, when it has waited for others so long; pure."""
    return (
        f"hvdtrain: rank 0 has waited for {seconds:.0f} s {_described(state)}\n"
        f"  for {names_of(absent)}: slow there, or stopped, or the host cannot be reached"
    )


def _described(state: State) -> str:
    done = f"after {state['updates']} update(s)"
    if state["kind"] == END:
        return f"{state['line']}, {done}"
    what = f"{state['kind']}, {done}"
    if state["kind"] == "update":
        what = " ".join(filter(None, ["update", str(state["number"]), state["key"]]))
    return f"in {what}: {state['line']}"


# -- call sites ----------------------------------------------------------------------------------------------------
def user_line(frame: FrameType | None = None) -> str:
    """Returns the line of the user's that led here, such as "train.py:31: evaluate(model, data)"; "?" if there is none.

    It is the innermost one outside of libraries: of the user's own modules, or of the program that was started.

    Args:
        frame: where to look from; by default from the caller.
    """
    frame = _users_frame(frame if frame is not None else sys._getframe(1))
    if frame is None:
        return "?"
    path = frame.f_code.co_filename
    text = linecache.getline(path, frame.f_lineno, frame.f_globals).strip()
    shown = text if len(text) <= 100 else text[:97] + "..."
    return f"{os.path.basename(path)}:{frame.f_lineno}" + (f": {shown}" if shown else "")


def _users_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        module = (frame.f_globals.get("__name__") or "").partition(".")[0]
        generated = os.path.basename(frame.f_code.co_filename).startswith("__autograph_generated_file")
        if module not in _LIBRARIES and not generated:
            break
        frame = frame.f_back
    return frame


def _function_of(frame: FrameType | None) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_code.co_qualname}" if frame is not None else ""


def _in_thread() -> str:
    """Returns what tells this thread from others on all ranks alike: its name, less numbers, which count threads."""
    name = threading.current_thread().name
    return "" if name == "MainThread" else " in thread " + re.sub(r"[-_]\d+", "", name)
