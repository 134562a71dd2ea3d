"""Ranks in step: all of them are at the same collective operation, or each gets an error with every rank's place.

An operation of the host (gather, barrier, a checkpoint's save ...) begins with a meeting: the ranks compare the
operations that they are about to run, so that different ones never pair. A meeting cannot detect a rank that waits in
the reduction of a training step, or at its end, for ranks that are elsewhere. `hvdtrain.watch.watch` detects it from
the notes that this module keeps.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hvdtrain.comm import elastic
from hvdtrain.comm.engines import Engine
from hvdtrain.comm.lines import function_of, in_thread, user_line, users_frame
from hvdtrain.comm.ring import MEETING, NOWHERE, UPDATE, Ring, forget, last_words
from hvdtrain.core.errors import ConfigError, ReplicaError, by_rank

END, BARRIER = "end", "barrier"  # may be reached on another line by each rank

# What a rank says about its place, as JSON: kind, number, key, text; and updates, meetings: how many it has completed.
State = Mapping[str, Any]


class Watches(Protocol):
    """The interface of a tracker's watch."""

    def close(self, *, wait: bool = True) -> None: ...
    def use_run_dir(self, run_dir: Path) -> None: ...


@dataclass(slots=True)
class Place:
    """A collective operation that this rank is in."""

    kind: str  # "update" (of training), or what is done at a meeting
    number: int  # of the update, or of the meeting, counted from 1
    key: object  # what else must be the same on all ranks; its text counts
    line: str | None = None  # the user's, as text; None: look for it in the thread's stack when it is asked for
    within: str = ""  # the user's function with that line
    receives: bool = False  # this rank gives nothing
    agreed: bool = False  # every rank is known to be in it
    since_s: float = field(default_factory=time.monotonic)
    thread: int = field(default_factory=threading.get_ident)  # that waits in it


class Tracker:
    """The place of this rank in the program, which it compares with the other ranks.

    Args:
        rank, size: this process's rank, and the number of ranks.
        on: False: it compares and notes nothing.

    Attributes:
        updates, meetings: completed so far; the same on every rank that is in step.
        steps: training steps, if `updates` also counts other operations: proofs, other collective ones of
            `hvdtrain guard`.
        longest_s: the longest time that this rank has been in one update.
        watch: its watch thread; ends with `close`.
        remedy: the fix if ranks are not in step, for programs that are not written with hvdtrain.
        phase: returns the current phase of training, if an adapter knows it.
        on_main_now: the function that rank 0 runs alone at present, or "".
        ring: the page with this rank's counts, which remains when the process has ended.
    """

    watch: Watches | None = None
    remedy = ""
    ring: Ring | None = None
    run_dir: Path | None = None

    def __init__(self, rank: int = 0, size: int = 1, *, on: bool = True) -> None:
        self.rank, self.size = rank, size
        self.on = on and size > 1
        self.updates = self.meetings = 0
        self.steps: int | None = None
        self.phase: Callable[[], str] = str
        self.longest_s = 0.0
        self._update: Place | None = None
        self._meeting: Place | None = None
        self._last: Place | None = None
        self.on_main_now = ""
        self.failed = ""
        self._pid, self._left = os.getpid(), False

    def close(self, *, wait: bool = True) -> None:
        """Ends the watch; from now on it compares and notes nothing."""
        self.on = False
        if self.watch is not None:
            self.watch.close(wait=wait)
            self.watch = None

    def follow(self, earlier: Tracker) -> None:
        """Takes over what is not of the ranks: they have changed."""
        self.phase, self.remedy, self.longest_s, self.run_dir = (
            earlier.phase, earlier.remedy, earlier.longest_s, earlier.run_dir
        )  # fmt: skip
        if self.run_dir is not None:
            self.use_run_dir(self.run_dir)

    def use_run_dir(self, run_dir: Path) -> None:
        """Writes this rank's reports and pages into `run_dir` from now on."""
        self.run_dir = run_dir
        if self.watch is not None:
            self.watch.use_run_dir(run_dir)
        else:  # no page of this attempt takes the place of an earlier one's
            forget(run_dir, self.rank, self.size, folder=True)

    def fails(self, error: BaseException, *, ends: bool = True) -> None:
        """Notes that this rank fails, in its page in the run's directory; see `ring.last_words`."""
        if self.size > 1 and os.getpid() == self._pid and not self._left:
            self.ring = last_words(self.ring, self.run_dir, self.rank, error, ends=ends)
            self.failed = type(error).__name__

    def leave(self) -> None:
        """Closes the watch; collective operations are refused from now on."""
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
        name = kind if kind in (BARRIER, END) else kind + in_thread()
        line = f"at the end of {os.path.basename(sys.argv[0]) or 'the program'}" if kind == END else user_line()
        place = self._meeting = Place(name, self.meetings + 1, key, line)
        place.within, place.receives = function_of(users_frame(sys._getframe(1))), receives
        self._mark(MEETING)
        try:
            total = self._compare(comm, place, value or 0.0)
            place.agreed = True
            yield total
        finally:
            self._meeting, self._last = None, place
            self._mark(UPDATE if self._update is not None else NOWHERE)

    def _mark(self, place: int) -> None:
        if self.ring is not None:
            self.ring.note(place, self.updates, self.meetings, self.trained())

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
        """A context in which rank 0 runs the function `name` alone, and the others wait for its result."""
        self.on_main_now = f"{name}, from {user_line()}"
        try:
            yield
        finally:
            self.on_main_now = ""

    def _refuse_second_thread(self, kind: str) -> None:
        """Raises ReplicaError if two threads meet at once: their order differs by rank, so results would be swapped."""
        other = self._meeting
        if other is not None and other.thread != threading.get_ident() and self.on:
            raise ReplicaError(
                "two threads of a rank cannot be in collective operations at the same time",
                f"{kind}{in_thread()}, {user_line()}\nwhile another thread is in {other.kind}, {other.line}",
                "make collective calls in one thread only",
            )

    def _refuse_elsewhere(self, kind: str) -> None:
        """Refuses what is collective where the other ranks are not: in a fork, after the end, in `on_main`."""
        if self.size > 1 and os.getpid() != self._pid:
            raise ConfigError(
                "collective calls are not allowed in a process that was forked from a rank",
                f"{kind}, {user_line()}, in process {os.getpid()}, forked from {self._pid}",
                "call it in the rank's process, and pass the result to the workers (of a DataLoader, a Pool ...)",
            )
        if self._left:
            raise ConfigError(
                "collective calls are not allowed after the rank has left its world",
                f"{kind}, {user_line()}, after this rank has left its world",
                "call it inside of `with hvdtrain.init(...)`, before the program ends",
            )
        if self.on_main_now and self.on:
            raise ReplicaError(
                "a function of on_main() must not call a collective operation: only rank 0 runs it",
                f"{kind}, {user_line()}\nin on_main({self.on_main_now})",
                "call it on every rank, outside of on_main(); use on_main() only for work with the result",
                code=46,
            )

    # -- training --------------------------------------------------------------------------------------------------
    def begin_update(self, key: object) -> None:
        """Notes that this rank is in the reduction of a training step; the next `begin_update` replaces it."""
        self._refuse_elsewhere("a training step")
        if self.on:
            self._update = Place("update", self.updates + 1, key)
            self._mark(UPDATE)

    def trained(self) -> int:
        """Returns how many updates the training has done."""
        return self.updates if self.steps is None else self.steps

    def stepped(self, steps: int) -> None:
        """Notes the number of training steps done, for a training that also notes other operations as updates."""
        self.steps = steps
        self._mark(UPDATE if self._update is not None else NOWHERE)

    def end_update(self) -> None:
        """Notes that the reduction is complete."""
        if self._update is not None:
            self.longest_s = max(self.longest_s, time.monotonic() - self._update.since_s)
            self._update, self._last = None, self._update
            self.updates += 1
            self._mark(NOWHERE)

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
        """Does as `begin_update` for a reduction within an update, such as batch norm's; does not count it."""
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

    # -- reports -------------------------------------------------------------------------------------------------------
    def stuck(self, after_s: float) -> State | None:
        """Returns where this rank has waited for `after_s` or longer, unless all ranks are known to be there."""
        update, meeting = self._update, self._meeting
        if meeting is not None and meeting.agreed:
            return None
        place = update or meeting  # a meeting within an update is part of it
        if place is None or time.monotonic() - place.since_s < after_s:
            return None
        return self.state_of(place)

    def standing(self) -> object:
        """Returns what equals another one as long as this rank has not come to another place."""
        return self._update, self._meeting, self.updates, self.meetings, self.on_main_now

    def doing(self) -> dict[str, Any]:
        """Returns what this rank does, in a collective operation or not."""
        update, meeting, on_main, last = self._update, self._meeting, self.on_main_now, self._last
        place = None if on_main else update or meeting
        return {
            "at": None if place is None else {**self.state_of(place), "agreed": place.agreed},
            "updates": self.updates, "steps": self.trained(), "meetings": self.meetings, "on_main": on_main,
            "phase": self.phase(), "failed": self.failed,
            "last": last and {"kind": last.kind, "number": last.number, "line": last.line},
        }  # fmt: skip

    def state_of_update(self, key: object) -> State:
        """Returns the state of a rank that has just completed an update, and found that it was not the others'."""
        return self.state_of(Place("update", self.updates, key, user_line()))

    def state_of(self, place: Place) -> State:
        line = place.line
        if line is None:
            line = user_line(sys._current_frames().get(place.thread))
        return {
            "kind": place.kind, "number": place.number, "key": str(place.key), "line": line,
            "updates": self.updates, "steps": self.trained(), "meetings": self.meetings,
        }  # fmt: skip


OFF = Tracker()


# -- pure ----------------------------------------------------------------------------------------------------------
def deadlocked(states: Sequence[State]) -> bool:
    """Returns True if ranks that all wait, each at the place in its state, wait for one another; pure.

    A rank does not wait in vain while every other one is in the same operation, or has completed it: then all have
    sent the data that it needs, and it is only slow to receive.
    """
    return all(any(_lacks(mine, other) for other in states) for mine in states)


def _lacks(mine: State, other: State) -> bool:
    training = mine["kind"] == "update"
    if training == (other["kind"] == "update") and mine["number"] == other["number"]:
        return training and mine["key"] != other["key"]  # at a meeting they compare that themselves
    return other["updates" if training else "meetings"] < mine["number"]


def _others_receive(states: Sequence[State]) -> bool:
    """Returns True if ranks only differ by `if is_main: broadcast(x)`, `else: broadcast(None)` of a function; pure."""
    first = states[0]
    same = ("kind", "number", "key", "updates", "within")
    if first["kind"].partition(" ")[0] != "broadcast" or any(s[name] != first[name] for s in states for name in same):
        return False
    root = states[int(first["key"])]
    return all(state["receives"] or state["line"] == root["line"] for state in states)


def out_of_step(states: Sequence[State], remedy: str = "") -> ReplicaError:
    """Returns the error that names where each rank is; pure. Without a remedy, that for programs of hvdtrain's."""
    advice = [
        "call collective functions (evaluate, save, gather ...) on every rank, in the same order,\n"
        "on the same line, and not under `if world.is_main:`",
        "break and continue on every rank alike (stop = world.broadcast(stop) gives all rank 0's decision)",
    ]
    if any(state["kind"] == END for state in states):  # it has left the loop
        advice.reverse()
    return ReplicaError(
        "every rank must come to the same collective operation",
        by_rank(list(map(described, states))),
        remedy
        or elastic.hint()
        + ";\n".join([*advice, "give every rank the same number of batches, as hvdtrain's loaders do"]),
        shared=True,
        code=43,
    )


def described(state: State) -> str:
    """Returns where a rank is, in words; pure."""
    steps = state.get("steps", state["updates"])  # of the training: a proof before the first is none
    done = f"after {steps} update(s)"
    if state["kind"] == END:
        return f"{state['line']}, {done}"
    what = f"{state['kind']}{' for ' * bool(state['key'])}{state['key']}, {done}"
    if state["kind"] == "update":
        what = " ".join(filter(None, ["update", str(steps + 1), state["key"]]))
    return f"in {what}: {state['line']}"
