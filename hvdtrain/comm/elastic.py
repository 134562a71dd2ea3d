"""Ranks that continue when some are lost, and admit new ones, without a restart of any rank.

A *formation* is the set of processes that are one world. When one of them is lost, a collective operation fails on all
others, maybe not the same one on each: it has completed on some. They leave their engine, wait for the launcher to
assign their ranks in the next formation, and compare their progress. All are in the same operation, or one behind:

- an update that one rank has completed is complete: the others get its weights, and continue after that update;
- an update that no rank has completed is discarded: its samples are dealt again, to the ranks of the new formation;
- any other operation that one rank has completed gives the others its result; else all ranks repeat it.

New ranks join between two updates: the launcher requests it, the request travels with an update, and all ranks leave
their engine before the next batch. A new process runs the program from its top; collective operations there return
what they returned on rank 0, until its loop over epochs begins.
"""

from __future__ import annotations

import base64
import functools
import os
import pickle
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar, cast

from hvdtrain.comm.agent import AgentLine, Form, line_of
from hvdtrain.core import variables
from hvdtrain.core.errors import ConfigError, HvdtrainError, RanksLost, ReplicaError

NEW = "new"
_PIECE_BYTES = 96 << 10
_MOST_BYTES = 64 << 20  # of what new ranks are told of the set-up
_NOTHING: Any = object()

P = ParamSpec("P")
T = TypeVar("T")
Answers = list[tuple[str, Any]]  # of collective operations: what was asked, what came


class Report(NamedTuple):
    """A rank's report in a new formation: its completed `updates` and other operations (`done`)."""

    new: bool  # it has trained nothing so far
    updates: int
    done: int
    operation: bool  # it was in one that is no update
    reported: bool  # the launcher knows what the set-up gave
    place: Any  # where its loop goes on


class Member(Protocol):
    """The model and the loop that train on this rank."""

    @property
    def updates(self) -> int: ...
    def place(self) -> Any:
        """Returns where the loop continues after the completed updates, with what it needs there; picklable."""

    def state(self) -> bytes:
        """Returns the complete training state."""

    def take(self, state: bytes, *, new: bool) -> None:
        """Takes another rank's state; `new`: this process has trained nothing so far."""

    def go_on(self, place: Any, *, late: bool) -> None:
        """Continues, after the ranks have changed, at a place that a rank has given; `late`: other ranks had completed
        the update that this rank was in."""


class JobRanks:
    """The ranks of a job that stay as they are; `Elastic`: those that may change.

    Attributes:
        formation: the number of the current one.
        member: what trains; None before it is prepared.
        joining: a new process that has not met the others yet.
    """

    may_change = False
    formation = 0
    member: Member | None = None
    joining = False

    @property
    def inside(self) -> bool:
        """Returns True if this rank is in an operation that will be repeated as a whole."""
        return False

    @property
    def wants_to_leave(self) -> bool:
        """Returns True if the launcher has asked for another formation; sent with the next update."""
        return False

    def run(self, name: str, operation: Callable[[], T]) -> T:
        """Returns what the operation gives on the ranks that are there in the end."""
        return operation()

    def without_repeating(self, operation: Callable[[], None]) -> None:
        """Runs an operation that must not be repeated."""
        operation()

    def connecting(self, connections: Any) -> AbstractContextManager[None]:
        """A context in which the engine connects to other ranks; `Elastic` can cut these connections later."""
        return nullcontext()

    def lose(self, ranks: Sequence[int], formation: int) -> bool:
        """Asks the launcher to continue without ranks that hang; returns False if the job cannot."""
        return False

    def updated(self) -> None:
        """Notes an update; the first one shows that the set-up is complete."""

    def begin_epoch(self) -> None:
        """Begins a loop over an epoch; a new process meets the others here."""

    def in_epoch(self) -> None:
        """Notes that there is a batch: what is collective at the head of the epoch has been done."""

    def regroup(self, lost: RanksLost | None, *, operation: bool = False, joinable: bool = True) -> Any:
        """Enters the next formation, after a loss, or (None) because all ranks have agreed to leave or this one is
        new. If an `operation` failed that is no update, returns its result if another rank has it, else `_NOTHING`:
        then it must be repeated. `joinable`: a new rank, which begins with the next batch, will call all collectives
        that follow. Raises the loss if ranks cannot change."""
        raise lost or ConfigError("ranks must be those of an elastic job to change", "a job of fixed ranks")


class Elastic(JobRanks):
    """The part of an elastic job in one process: keeps it in the job when its world changes.

    Attributes:
        join: enters a formation; then the world consists of the formation's ranks.
        leave: shuts the engine down; `cut`: without waiting for the other ranks.
        gather, broadcast: return every rank's object, or that of one rank, of the joined formation.
    """

    may_change = True

    join: Callable[[Form], None]
    leave: Callable[..., None]
    gather: Callable[[Any], list[Any]]
    broadcast: Callable[[Any, int], Any]

    def __init__(self, line: AgentLine, *, new: bool, answers: Answers) -> None:
        self.line, self.joining = line, new
        self.formation = line.formation = 0 if new else 1
        self._inside = False
        self._done = 0  # operations
        self._last: Any = None  # what the last one gave
        self._replayed = answers
        self._setup: Answers = []
        self._head: Answers = []  # of the epoch
        self._recording: Answers | None = None if new else self._setup
        self._reported = new  # rank 0's set-up is known to the launcher

    # -- collective operations that are no updates ---------------------------------------------------------------
    def run(self, name: str, operation: Callable[[], T]) -> T:
        if self._replayed or self.joining:
            return cast(T, self._replay(name))
        while True:
            self._inside = True
            try:
                result = operation()
            except RanksLost as lost:
                if self.member is None:
                    raise
                self._inside = False
                found = self.regroup(lost, operation=True)
                if found is _NOTHING:
                    continue
                result = found
            finally:
                self._inside = False
            self._done, self._last = self._done + 1, result
            if self._recording is not None:
                self._recording.append((name, result))
            return result

    def without_repeating(self, operation: Callable[[], None]) -> None:
        before, self._inside = self._inside, True
        try:
            operation()
        finally:
            self._inside = before

    @property
    def inside(self) -> bool:
        return self._inside

    def _replay(self, name: str) -> Any:
        asked, result = self._replayed.pop(0) if self._replayed else ("nothing more", None)
        if asked != name:
            raise ReplicaError(
                "a new rank must make the same collective calls as the other ranks before its loop begins",
                f"{name}, where rank 0 called {asked}",
                "collective calls must not depend on time, on files that change, or on the rank",
            )
        return result

    # -- training ------------------------------------------------------------------------------------------------
    @property
    def wants_to_leave(self) -> bool:
        return self.line.asked_to_leave >= self.line.formation > 0

    def updated(self) -> None:
        if not self._reported:
            self._reported = True
            if os.environ["HOROVOD_RANK"] == "0":
                self._send_answers(self._setup)

    def connecting(self, connections: Any) -> AbstractContextManager[None]:
        self.line.cut = connections.cut
        noted: AbstractContextManager[None] = connections.noted()
        return noted

    def lose(self, ranks: Sequence[int], formation: int) -> bool:
        if self.member is not None:
            self.line.say(do="hung", formation=formation, ranks=list(ranks))
        return self.member is not None

    def _send_answers(self, recorded: Answers) -> None:
        try:
            data = pickle.dumps(recorded)
        except Exception as error:  # what users' functions return
            print(f"hvdtrain: no new ranks can join: what the set-up gave cannot be pickled: {error}", file=sys.stderr)
            return
        if len(data) > _MOST_BYTES:
            print(f"hvdtrain: no new ranks can join: the set-up gave {len(data) >> 20} MiB", file=sys.stderr)
            return
        for start in range(0, len(data), _PIECE_BYTES):
            text = base64.b64encode(data[start : start + _PIECE_BYTES]).decode()
            self.line.say(do="answers", data=text, last=start + _PIECE_BYTES >= len(data))

    def begin_epoch(self) -> None:
        if self.joining:
            self.regroup(None)
        else:
            self._head = self._recording = []

    def in_epoch(self) -> None:
        self._recording = None
        if self._replayed:
            raise ReplicaError(
                "a new rank must make the same collective calls as the other ranks at the start of the epoch",
                f"{self._replayed[0][0]}, which the other ranks called, was not called",
                "collective calls must not depend on time, on files that change, or on the rank",
            )

    def regroup(self, lost: RanksLost | None, *, operation: bool = False, joinable: bool = True) -> Any:
        member = self.member
        if member is None:
            raise ConfigError(
                "an elastic job needs prepare() and a loop over the epochs of its loader",
                "a loop over epochs without a prepared model",
                "PyTorch: hvt.prepare(model, optimizer, train), then for epoch in train.epochs(...);\n"
                "Keras: hvdtrain.keras.prepare(model, data), then model.fit(data, ...)",
            )
        cut = lost is not None
        while True:
            try:
                self._form(cut=cut, joinable=joinable and not operation)
                return self._settle(member, operation)
            except RanksLost:
                cut = True

    def _form(self, *, cut: bool, joinable: bool) -> None:
        self.leave(cut=cut)
        self.line.say(do="wait", formation=self.line.formation, joinable=joinable, empty=self.joining)
        form = self.line.next_form()
        if form is None:
            raise HvdtrainError(
                "an elastic job needs its launcher", "the agent is gone", "read what hvdtrain launch has printed"
            )
        self.formation = self.line.formation = int(form["formation"])
        self.join(form)

    def _settle(self, member: Member, operation: bool) -> Any:
        """Compares how far all ranks have come, and makes them equal."""
        new, mine = self.joining, member.updates
        place = None if new else member.place()
        reports = self.gather(Report(new, mine, self._done, operation, self._reported, place))
        old = [rank for rank, its in enumerate(reports) if not its.new]
        updates = max(reports[rank].updates for rank in old)
        source = next(rank for rank in old if reports[rank].updates == updates)
        if any(its.new or its.updates < updates for its in reports):
            sends = os.environ["HOROVOD_RANK"] == str(source)
            sent = (member.state(), self._head, self._done) if sends else None
            state, head, done = self.broadcast(sent, source)
            if new or mine < updates:
                member.take(state, new=new)
            if new:
                self.joining, self._done = False, done
                self._head, self._replayed = head, list(head)  # the next new one may be fed by this one
        result = self._result(reports, old, operation)
        self._reported = any(its.reported for its in reports)
        member.go_on(reports[source].place, late=not new and mine < updates)
        return result

    def _result(self, reports: Sequence[Report], old: Sequence[int], operation: bool) -> Any:
        """Returns what the others have got of the operation that this rank was in; collective."""
        done = max(reports[rank].done for rank in old)
        if not any(reports[rank].operation and reports[rank].done < done for rank in old):
            return _NOTHING
        last = self.broadcast(self._last, next(rank for rank in old if reports[rank].done == done))
        return last if operation and self._done < done else _NOTHING


_ranks = JobRanks()
_line: AgentLine | None = None


def begin(environ: MutableMapping[str, str]) -> JobRanks:
    """Finds out whether the ranks of this job may change, and returns them. Once a process. A new process
    gets the place of the last rank of the first formation, until it joins: what it does before is what that rank has
    done. Raises `ConfigError` for variables of the launcher's without its line."""
    global _ranks, _line
    if _ranks.may_change:
        return _ranks
    _line = _line or line_of(environ)
    kind = environ.get(variables.ELASTIC, "")
    if not kind:
        return _ranks
    if _line is None:
        raise ConfigError(
            "a rank of an elastic job needs a connection to its launcher",
            f"{variables.ELASTIC}={kind}, and no such connection",
            "start the program directly, or by a command that keeps open descriptors (bash does, sudo does not)",
        )
    answers: Answers = []
    if kind == NEW:
        size = int(environ[variables.ELASTIC_SIZE])
        answers = pickle.loads(
            Path(environ[variables.ELASTIC_ANSWERS]).read_bytes()
        )  # of rank 0 of this job, through its launcher
        numbers: dict[str, object] = {"RANK": size - 1, "SIZE": size, "CROSS_RANK": 0, "CROSS_SIZE": 1}
        slot, slots = _slot(environ)
        local_size = min(slots, size)
        numbers |= {"LOCAL_RANK": min(slot, local_size - 1), "LOCAL_SIZE": local_size}
        environ.update({f"HOROVOD_{name}": str(number) for name, number in numbers.items()})
        environ.update({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "9"})
        environ.setdefault("HOROVOD_HOSTNAME", "127.0.0.1")
    _ranks = Elastic(_line, new=kind == NEW, answers=answers)
    return _ranks


def _slot(environ: Mapping[str, str]) -> tuple[int, int]:
    slot, slots = environ[variables.ELASTIC_SLOT].split("/")
    return int(slot), int(slots)


def place_on_host(local_rank: int, local_size: int) -> tuple[int, int]:
    """Returns what a process's GPU goes by, and of how many: a new one's slot, which no other on its host has, while
    local ranks are counted again in each formation."""
    return _slot(os.environ) if _ranks.joining else (local_rank, local_size)


def ranks() -> JobRanks:
    """Returns the ranks of this process's job."""
    return _ranks


def hint() -> str:
    """Returns what may be the cause where ranks do not do the same, and new ones have come."""
    if _ranks.formation < 2:
        return ""
    return (
        "a rank that has joined began at the program's top: what the loop counts and keeps in variables must follow"
        " from epoch and optimizer.progress, or be given to extra=\n"
        "(docs/torch-reference.md#ranks-that-come-and-go); else "
    )


def note_progress(updates: int) -> None:
    """Reports to the launcher, if it is `hvdtrain launch`, how many updates of the run are done."""
    if _line is not None:
        _line.note(updates)


def line() -> AgentLine | None:
    """Returns this process's line to its launcher, if it has one."""
    return _line


def repeated(function: Callable[P, T]) -> Callable[P, T]:
    """Makes a collective function one that elastic ranks repeat as a whole when some of them are gone.

    Its result is the same on every rank, can be pickled, and doing it again does no harm.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if _ranks.inside:
            return function(*args, **kwargs)
        return _ranks.run(function.__qualname__, lambda: function(*args, **kwargs))

    return call


def variables_of(form: Form) -> dict[str, str]:
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    found = {f"HOROVOD_{name.upper()}": str(form[name]) for name in names}
    address = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": str(form["address"])}
    return found | address | {"HOROVOD_GLOO_RENDEZVOUS_PORT": str(form["port"])}
