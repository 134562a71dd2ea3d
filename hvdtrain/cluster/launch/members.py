"""The workers of an elastic job, and their formations: events in, actions out; pure.

A worker is a process with a unique number, which is never used again. A formation is a set of workers that are one
Horovod world, numbered from 1. A member that has left its formation waits for the next. When every living member
waits, they and the new workers that are ready make the next one. Rank 0 is always a survivor: the others begin with
its state.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.cluster.hosts.hosts import Host, Slot, numbered

SECONDS_TO_LEAVE = 60.0  # that members of a formation have, once one of it is lost or has left it
SECONDS_TO_END = 30.0  # that a worker has whose place is gone, before it is killed
SECONDS_TO_BREAK = 1.0  # and that what they are blocked in has to fail by itself; ten times that where all agreed
SECONDS_TO_SETTLE = 0.25  # after a loss: others of its host may follow, and one that is lost while others meet is worse
SECONDS_TO_GATHER = 10.0  # that a new worker waits for others that are on their way, so that all join at once
MOST_FORMATIONS = 10  # without an update between
_LONGEST_START_S = 600.0  # that a host's new workers wait: twice as long after each that was lost before it trained
LATE = "it has not left its formation in time: stopped, or blocked"
_RETRY_S = 10.0  # until a host that cannot be reached is tried again; longer each time
_LONGEST_RETRY_S = 60.0


# ---- actions


@dataclass(frozen=True)
class ReachHost:
    """An action: reach a host, then call `host_there` or `host_gone`."""

    host: Host


@dataclass(frozen=True)
class StartWorker:
    """Start a worker."""

    number: int
    host: Host
    slot: int  # of its host's, from 0: no other living worker has it


@dataclass(frozen=True)
class Signal:
    """An action: send a worker SIGKILL or SIGTERM; call `gone` when it has ended."""

    number: int
    signal: int


@dataclass(frozen=True)
class Say:
    """An action: send a message to a worker."""

    number: int
    message: dict[str, Any]


@dataclass(frozen=True)
class Serve:
    """An action: serve the rendezvous of the next formation on a host, then call `served`."""

    serial: int
    host: str
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Unserve:
    """An action: end the rendezvous of the present formation, so that no worker waits there any longer."""


@dataclass(frozen=True)
class Lost:
    """An action: report a lost worker."""

    number: int
    host: str
    why: str


@dataclass(frozen=True)
class Formed:
    """An action: report a formation."""

    formation: int
    numbers: tuple[int, ...]
    slots: tuple[Slot, ...]
    after_s: float


@dataclass(frozen=True)
class Fail:
    """End the job."""

    why: str


Action = ReachHost | StartWorker | Signal | Say | Serve | Unserve | Lost | Formed | Fail


# ---- membership


@dataclass(frozen=True)
class Limits:
    """The limits of a job's size, and the time limits of its workers."""

    minimum: int  # of workers
    maximum: int
    timeout_s: float = 600.0  # how long to run with fewer
    start_s: float = 1800.0  # how long a new worker may take until it is ready
    open: bool = False  # hosts may still be added


@dataclass
class Worker:
    """A living worker.

    Attributes:
        state: a new one is "starting", then "ready"; a member of the formation is "in" it, or has left it ("out").
    """

    number: int
    host: str
    slot: int  # of its host's, from 0, as long as it lives: its GPU goes by it
    state: Literal["starting", "ready", "in", "out"]
    rank: int = -1  # in the formation
    joinable: bool = True  # new workers can join where it left the formation
    empty: bool = False  # it left before it received what is trained
    leaving: bool = False  # its slot is taken away
    trained: bool = False  # it was in a formation that did an update
    started_s: float = 0.0
    ending_s: float = float("inf")  # when it was first seen that it was preempted, and still ran

    @property
    def member(self) -> bool:
        return self.state in ("in", "out")


class Members:
    """The membership of one job. Each event returns what is to be done, in order.

    Attributes:
        formation: the present one's number.
        workers: those that live, by their number.
        well: rank 0 came to its end.
    """

    def __init__(self, slots: Sequence[Slot], hosts: Sequence[Host], limits: Limits) -> None:
        """Makes formation 1 of `slots`; `hosts`: all that may be used, in order."""
        self.formation = 1
        self.workers = {
            slot.rank: Worker(slot.rank, slot.host.name, slot.local_rank, "in", slot.rank, trained=True)
            for slot in slots
        }
        self.well = False
        self._hosts, self._limits = list(hosts), limits
        self._next = len(slots)
        self._there = {slot.host.name for slot in slots}
        self._reaching: set[str] = set()
        self._tries: Counter[str] = Counter()
        self._retry_s: dict[str, float] = {}
        self._dying: dict[int, Worker] = {}  # preempted: their slots are not free yet
        self._answers = False  # are there: what a new worker needs
        self._up = False  # an update of this formation is done: all its members have met
        self._broken_s: float | None = None  # since when this formation is not whole
        self._lost_s = float("-inf")  # when the last member was lost
        self._aborted = self._regrouping = self._ending = self._failed = False
        self._ready_s: float | None = None  # since when a new worker has waited
        self._short_s: float | None = None  # since when there are too few
        self._serial, self._asked = 0, None  # type: int, tuple[int, ...] | None
        self._formed = 0  # formations since the last update
        self._failed_starts: Counter[str] = Counter()  # by host: workers that have not trained, since one has
        self._start_s: dict[str, float] = {}  # by host: when the next one may start
        self._actions: list[Action] = []

    @property
    def over(self) -> bool:
        """Returns True if the job has come to its end, and every worker has ended."""
        return self._ending and not self.workers

    def members(self) -> list[Worker]:
        """Returns the present formation's, as far as they live, in the order of their ranks."""
        return sorted((its for its in self.workers.values() if its.member), key=lambda its: its.rank)

    # ---- what workers do

    def waits(
        self, number: int, formation: int, now: float, *, joinable: bool = True, empty: bool = False
    ) -> list[Action]:
        """Notes that a worker has left a formation, or (0) is new and ready; see `Worker`."""
        its = self.workers.get(number)
        if its is not None and its.state == "in" and formation == self.formation:
            its.state, its.joinable, its.empty = "out", joinable, empty
            self._breaks(now)
        elif its is not None and its.state == "starting" and formation == 0:
            its.state = "ready"
            self._ready_s = now if self._ready_s is None else self._ready_s
        return self._settled(now)

    def updated(self, formation: int, now: float) -> list[Action]:
        """Notes that a formation has completed updates."""
        if formation == self.formation:
            self._up = True
            self._formed = 0
            for its in self.members():
                if not its.trained:
                    its.trained = True
                    self._failed_starts.pop(its.host, None)
        return self._settled(now)

    def answered(self, now: float) -> list[Action]:
        """Notes that the answers new workers need have arrived."""
        self._answers = True
        return self._settled(now)

    def finished(self, number: int, now: float) -> list[Action]:
        """Notes that a member has finished the program, or was preempted, as all are: no more formations follow."""
        its = self.workers.get(number)
        if its is None or not its.member:
            return self.lost([number], now, why="ended before it was a member", gone=True)
        self.well = self.well or its.rank == 0
        self._ending = True
        self._remove(number, gone=True)
        return self._settled(now)

    def lost(self, numbers: Iterable[int], now: float, *, why: str, gone: bool) -> list[Action]:
        """Workers are lost, together; if they are not `gone` they are killed. Those lost before do not count."""
        self._lose(list(numbers), now, why=why, gone=gone)
        return self._settled(now)

    def gone(self, number: int, now: float) -> list[Action]:
        """Notes that a worker which was sent a signal has ended."""
        self._dying.pop(number, None)
        return self._settled(now)

    # ---- what hosts do

    def offered(self, hosts: Sequence[Host], now: float) -> list[Action]:
        """Notes the only hosts that may be used from now on; drops the workers for which they have no slot."""
        self._hosts = list(hosts)
        slots = {host.name: host.slots for host in hosts}
        taken: Counter[str] = Counter()
        for its in sorted(self.workers.values(), key=lambda its: (not its.member, its.number)):
            taken[its.host] += 1
            its.leaving = taken[its.host] > slots.get(its.host, 0)
        for its in [its for its in self.workers.values() if its.leaving and not its.member]:
            self._remove(its.number, signal.SIGTERM)
        return self._settled(now)

    def host_there(self, name: str, now: float) -> list[Action]:
        """Notes that a host can be used."""
        self._reaching.discard(name)
        self._tries.pop(name, None)
        self._there.add(name)
        return self._settled(now)

    def host_gone(self, name: str, now: float, *, why: str) -> list[Action]:
        """Notes that a host cannot be reached, or not any more: its workers are lost."""
        self._reaching.discard(name)
        self._there.discard(name)
        self._tries[name] += 1
        self._retry_s[name] = now + min(_RETRY_S * self._tries[name], _LONGEST_RETRY_S)
        self._dying = {number: its for number, its in self._dying.items() if its.host != name}
        its = [worker.number for worker in self.workers.values() if worker.host == name]
        return self.lost(its, now, why=why, gone=True)

    def served(self, serial: int, address: str, port: int, now: float) -> list[Action]:
        """The rendezvous of the next formation is served."""
        if self._asked is None or serial != self._serial or self._ending:
            return []
        numbers, slots = self._asked, self._slots(self._asked)
        leaving = [its for its in self.members() if its.number not in numbers]
        after_s = now - self._broken_s if self._broken_s is not None else 0.0
        self.formation += 1
        for number, slot in zip(numbers, slots, strict=True):
            self.workers[number].state, self.workers[number].rank = "in", slot.rank
            names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
            place = {name: getattr(slot, name) for name in names}
            form = {"do": "form", "formation": self.formation, **place, "address": address, "port": port}
            self._actions.append(Say(number, form))
        self._actions.append(Formed(self.formation, numbers, slots, after_s))
        for its in leaving:
            self._remove(its.number, signal.SIGTERM)
        self._asked = self._broken_s = self._short_s = self._ready_s = None
        self._up = self._aborted = self._regrouping = False
        self._formed += 1
        if self._formed >= MOST_FORMATIONS:
            self._fail(f"{MOST_FORMATIONS} formations have done no update")
        return self._settled(now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        return self._settled(now)

    # ---- what follows

    def _settled(self, now: float) -> list[Action]:
        if not self._failed:
            self._look_at_late(now)
            if self._ending:  # there is no next formation to wait for
                for number in [its.number for its in self.workers.values() if its.state != "in"]:
                    self._remove(number, signal.SIGTERM)
            else:
                self._fill(now)
                self._form(now)
                self._regroup(now)
                self._look_at_shortage(now)
        actions, self._actions = self._actions, []
        return actions

    def _breaks(self, now: float) -> None:
        self._broken_s = now if self._broken_s is None else self._broken_s

    def _lose(self, numbers: Collection[int], now: float, *, why: str, gone: bool) -> None:
        lost = [self.workers[number] for number in numbers if number in self.workers]
        for its in lost:
            self._remove(its.number, 0 if gone else signal.SIGKILL, gone=gone)
            self._actions.append(Lost(its.number, its.host, why))
            if not its.trained:
                self._start_s[its.host] = now + min(2.0 ** min(self._failed_starts[its.host], 10), _LONGEST_START_S)
                self._failed_starts[its.host] += 1
        if not any(its.member for its in lost):
            return
        self._lost_s = now
        self._breaks(now)
        if not self._up:  # members may still wait for it where they meet
            self._actions.append(Unserve())
        self._abort()  # only who waits for the lost one sees a broken connection; others wait for those, and so on

    def _abort(self) -> None:
        self._aborted = True
        self._actions += [
            Say(its.number, {"do": "abort", "formation": self.formation}) for its in self.members() if its.state == "in"
        ]

    def _remove(self, number: int, sends: int = 0, *, gone: bool = False) -> None:
        its = self.workers.pop(number)
        if self._asked is not None and number in self._asked:
            self._asked = None
        if not gone:
            self._dying[number] = its
            self._actions.append(Signal(number, sends))

    def _fail(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            self._actions.append(Fail(why))

    def _look_at_late(self, now: float) -> None:
        """Ends the wait for members that are blocked where no connection breaks, or stopped; for new workers; and for
        those that were preempted."""
        for number, its in self._dying.items():
            its.ending_s = min(its.ending_s, now)
            if now - its.ending_s >= SECONDS_TO_END:
                self._actions.append(Signal(number, signal.SIGKILL))
                its.ending_s = now
        limit_s = self._limits.start_s
        slow = [its for its in self.workers.values() if its.state == "starting" and now - its.started_s >= limit_s]
        why = f"it has not come to hvdtrain.init within {limit_s:g} s"
        self._lose([its.number for its in slow], now, why=why, gone=False)
        late = [its.number for its in self.members() if its.state == "in"]
        if self._broken_s is None or not late or self._ending:
            return
        if now - self._broken_s >= SECONDS_TO_BREAK * (10 if self._regrouping else 1) and not self._aborted:
            self._abort()
        if now - self._broken_s >= SECONDS_TO_LEAVE:
            self._lose(late, now, why=LATE, gone=False)

    def _fill(self, now: float) -> None:
        """Has workers started wherever there is room."""
        if not self._answers:
            return
        wanted = self._limits.maximum - sum(not its.leaving for its in self.workers.values())
        there = [*self.workers.values(), *self._dying.values()]
        for host in self._hosts:
            taken = {its.slot for its in there if its.host == host.name}
            take = min(wanted, host.slots - len(taken))
            if take <= 0 or (host.name in self._there and now < self._start_s.get(host.name, now)):
                continue
            if host.name in self._there:
                for slot in [slot for slot in range(host.slots) if slot not in taken][:take]:
                    self.workers[self._next] = Worker(self._next, host.name, slot, "starting", started_s=now)
                    self._actions.append(StartWorker(self._next, host, slot))
                    self._next += 1
            elif host.name not in self._reaching:
                if now < self._retry_s.get(host.name, now):
                    continue
                self._reaching.add(host.name)
                self._actions.append(ReachHost(host))
            wanted -= take

    def _chosen(self) -> list[Worker]:
        """The next formation, if it were made now, in the order of its ranks."""
        members = self.members()
        ready = [its for its in self.workers.values() if its.state == "ready"]
        staying = [its for its in members if not its.leaving]
        if not staying or len(staying) + len(ready) < self._limits.minimum:
            staying = members  # whose hosts may be there for a while yet
        chosen = staying + ready[: max(0, self._limits.maximum - len(staying))]
        first: dict[str, int] = {}  # by host: where its first worker stands, survivors before new ones
        for place, its in enumerate(chosen):
            first.setdefault(its.host, place)
        return sorted(chosen, key=lambda its: (first[its.host], not its.member, its.rank, its.number))

    def _slots(self, numbers: Sequence[int]) -> tuple[Slot, ...]:
        sizes = Counter(self.workers[number].host for number in numbers)  # in the order that hosts come
        known = {host.name: host for host in self._hosts}
        return tuple(numbered([known.get(name, Host(name)) for name in sizes], list(sizes.values())))

    def _form(self, now: float) -> None:
        members = self.members()
        if self._broken_s is None or self._asked is not None or any(its.state == "in" for its in members):
            return
        if all(its.empty for its in members):
            self._fail(f"no worker of formation {self.formation} remains that has the training state")
            return
        chosen = self._chosen()
        if len(chosen) >= self._limits.minimum and now - self._lost_s >= SECONDS_TO_SETTLE:
            if not all(its.joinable for its in members):  # new ones have to wait for the next update
                chosen = [its for its in chosen if its.member]
            self._asked = tuple(its.number for its in chosen)
            self._serial += 1
            self._actions.append(Serve(self._serial, chosen[0].host, self._slots(self._asked)))

    def _regroup(self, now: float) -> None:
        """Has the present formation left, at an update, if the next one would be another."""
        members = self.members()
        if self._broken_s is not None or self._regrouping or self._failed:
            return
        states = {its.state for its in self.workers.values()}
        if {"ready", "starting"} <= states and self._ready_s is not None and now - self._ready_s < SECONDS_TO_GATHER:
            return
        if {its.number for its in self._chosen()} != {its.number for its in members}:
            self._regrouping = True
            self._actions += [Say(its.number, {"do": "regroup", "formation": self.formation}) for its in members]

    def _look_at_shortage(self, now: float) -> None:
        minimum = self._limits.minimum
        if sum(its.state != "starting" for its in self.workers.values()) >= minimum or self._failed:
            self._short_s = None
            return
        self._short_s = now if self._short_s is None else self._short_s
        few = f"fewer than {minimum} workers (--min-np) remain"
        if not self._answers:
            self._fail(f"{few}, and none can join before the first update")
        elif sum(host.slots for host in self._hosts) < minimum and not self._limits.open:
            self._fail(f"{few}, and there are no slots for more")
        elif now - self._short_s >= self._limits.timeout_s:
            self._fail(f"{few}, for {self._limits.timeout_s:g} s (--elastic-timeout)")
