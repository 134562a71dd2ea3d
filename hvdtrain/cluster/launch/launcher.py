"""Runs one job on many hosts: an agent on each, their ranks started together, watched, and ended together.

`run` is what `hvdtrain launch`, `doctor` and `verify` start ranks with. It returns when nothing of the job is left, as
far as hosts can still be reached; what cannot be reached ends itself (hvdtrain.cluster.launch.agent).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from hvdtrain.cluster import addresses
from hvdtrain.cluster.launch import environment
from hvdtrain.cluster.launch.agents import Agents, Connection, OnLine
from hvdtrain.cluster.launch.failures import (
    HOST_LOST,
    Failure,
    RankEnd,
    as_exit_code,
    described,
    first_failure,
    settled,
)
from hvdtrain.cluster.launch.job import Job, Plan, Timeouts, make_plan
from hvdtrain.cluster.launch.rank import RETURNED
from hvdtrain.cluster.protocol import Message
from hvdtrain.core.errors import PREEMPTED_CODE, LauncherError
from hvdtrain.core.slurm import port_of

__all__ = ["Failure", "Job", "Outcome", "Plan", "Timeouts", "look", "result_in", "run"]

_TICK_S = 0.1
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_IGNORED = signal.SIGTSTP  # Ctrl-Z: hosts would take a launcher that is suspended for dead
_CUTS_S = 5.0  # that other hosts have to say so, too, once one is cut off the ranks' network
_PIECE_BYTES = 3 << 16  # of a rank's input in one message
_NOT_STARTED = 127  # as a shell says it of a command that is not there


@dataclass
class Outcome:
    """How a job ended.

    Attributes:
        failed: what made it end; None if every rank ended well, or the user ended it.
        interrupted: the signal by which the user ended it.
        preempted: ranks were told to end, and have ended as such.
        left: processes that stay, because the agents may not end them, in words.
        seconds: from the ranks' start to the end of the last.
    """

    failed: Failure | None = None
    interrupted: int | None = None
    preempted: bool = False
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """0; the first failing rank's; 85 when ranks were told to end, and did; 128+N when signal N ended the
        launcher's run."""
        if self.failed is not None:
            return self.failed.code
        if self.preempted:
            return PREEMPTED_CODE
        return 128 + self.interrupted if self.interrupted is not None else 0


class _Interrupted(Exception):
    """The user ended the job before its ranks were started."""


def run(
    job: Job,
    *,
    on_line: OnLine | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    on_interrupt: Callable[[int], None] = lambda number: None,
) -> Outcome:
    """Runs a job to its end.

    SIGINT, SIGTERM and SIGHUP end it (the ranks get the signal, then, after the grace, SIGKILL; a second one kills at
    once; after SIGTERM they may use the grace to save); SIGUSR1 and SIGUSR2 are passed on to the ranks; SIGTSTP
    (Ctrl-Z) does nothing. Only in the main thread, as signals are its.

    Args:
        job: what to run.
        on_line: gets each line a rank writes: rank, "stdout", "stderr" or "result" (`Job.given`), line. Called in a
            thread of its own; when it waits, so do the ranks. What it raises ends the job, and is raised here.
        on_plan: gets the plan before the ranks start.
        on_interrupt: gets the signal that ends the job, when it does, and every further one.

    Raises:
        ConfigError: fewer slots than ranks; no network that the hosts share.
        LauncherError: hosts that cannot be reached, or that lack what the job needs; each is named.
    """
    with _signals() as received:
        agents = Agents(job, on_line)
        running = _Running(job, agents, received, on_interrupt)
        try:
            with contextlib.suppress(_Interrupted):
                running.run(on_plan)
        finally:
            running.close()
    if agents.failed is not None:
        raise agents.failed
    return running.outcome


def result_of(job: Job, mark: str) -> tuple[dict[str, Any] | None, Failure | None]:
    """Runs a job whose rank 0 prints a result behind a mark; returns it (see `result_in`), and what made the job end.

    Raises:
        KeyboardInterrupt: the user ended it.
        ConfigError, LauncherError: as `run`.
    """
    lines: list[str] = []

    def take(rank: int, stream: str, line: str) -> None:
        if rank == 0:
            lines.append(line)

    outcome = run(job, on_line=take)
    if outcome.interrupted is not None:
        raise KeyboardInterrupt
    return result_in(lines, mark), outcome.failed


def result_in(lines: Sequence[str], mark: str) -> dict[str, Any] | None:
    """Returns what a rank printed as JSON behind a mark, the last time; None: nothing."""
    found = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
    return json.loads(found[-1]) if found else None


def look(job: Job) -> Plan:
    """Returns the plan for a job, for which the hosts are asked; nothing is started there but the agents.

    Raises:
        ConfigError, LauncherError: as `run`.
    """
    agents = Agents(job, None)
    try:
        agents.meet(lambda: None)
        return _plan(job, agents)
    finally:
        agents.close(wait_s=2.0)


def _plan(job: Job, agents: Agents) -> Plan:
    hellos = {its.host.name: its.hello or {} for its in agents.connections}
    local = [its.host.name for its in agents.connections if its.local]
    reached = addresses.reached({name: hello["reached"] for name, hello in hellos.items()}, local)
    return make_plan(job, hellos, reached, local)


class _Running:
    """One job from the agents' hello to its end.

    Attributes:
        outcome: how it ended, once it is closed.
    """

    def __init__(self, job: Job, agents: Agents, received: list[int], on_interrupt: Callable[[int], None]) -> None:
        self._job, self._agents, self._received, self._on_interrupt = job, agents, received, on_interrupt
        self.outcome = Outcome()
        self._ends: dict[int, RankEnd] = {}
        self._deadline_s: float | None = None  # of the end, once it has begun
        self._seen = 0  # of the received signals
        self._started_s = time.monotonic()
        self._host_of: dict[int, Connection] = {}
        self._token = uuid.uuid4().hex
        self._cut: dict[str, str] = {}  # by host: that it does not reach the first one any more
        self._cut_s = float("inf")  # when the first of them said so
        self._closing = False

    def run(self, on_plan: Callable[[Plan], None] | None) -> None:
        """Starts the ranks, watches them, and ends them."""
        agents, job = self._agents, self._job
        agents.meet(self._stop_if_asked)
        plan = _plan(job, agents)
        if on_plan is not None:
            on_plan(plan)
        port = self._rendezvous(plan) if job.horovod else None
        self._start(plan, port)
        while not all(its.ended or its.closed for its in agents.connections):
            self._look_at_signals()
            if (event := agents.next(_TICK_S)) is not None:
                self._take(*event)
            self._look_at_ranks()
            self._look_at_cuts()
            if self._deadline_s is not None and time.monotonic() > self._deadline_s:
                break
        self._look_at_ranks()  # hosts may all have left before
        self.outcome.preempted = any(end.preempted for end in self._ends.values())

    def close(self) -> None:
        """Lets the agents go, which end their ranks before they end, and passes on the last output."""
        self._closing = True
        if self._host_of:
            self.outcome.seconds = time.monotonic() - self._started_s
        ended = all(its.ended for its in self._agents.connections)
        wait_s = 2.0 if ended else self._job.timeouts.grace_s + 2.0
        self._agents.close(wait_s, token=self._token if self._host_of else "", look=self._look_at_signals)

    # ---- the start

    def _rendezvous(self, plan: Plan) -> int:
        """Has the first host serve Horovod's rendezvous; returns its port."""
        first = self._agents.connections[0]
        places = [
            (s.host.address, s.rank, s.local_rank, s.cross_rank, s.size, s.local_size, s.cross_size)
            for s in self._job.slots
        ]
        first.send("rendezvous", address=plan.chosen[first.host.name].address, places=places)
        deadline = time.monotonic() + self._job.timeouts.start_s
        while time.monotonic() < deadline:
            self._stop_if_asked()
            connection, message = self._agents.next(_TICK_S) or (None, None)
            if message is not None and message["type"] == "rendezvous":
                return int(message["port"])
            if message is not None and message["type"] == "failed":
                rule = f"Horovod's rendezvous must start on {first.host.name}, the first host"
                raise LauncherError(
                    rule, message["what"], "hvdtrain build-horovod --install there; hvdtrain doctor -H ..."
                )
            if connection is not None and message is None:
                rule, problem = f"{connection.host.name} must stay reachable", connection.problem()
                raise LauncherError(rule, problem.what, problem.fix)
        late = f"{first.host.name}: not after {self._job.timeouts.start_s:g} s"
        raise LauncherError("Horovod's rendezvous must start in time", late, "hvdtrain doctor -H ...")

    def _start(self, plan: Plan, port: int | None) -> None:
        master_port = port_of(uuid.uuid4().hex)
        first = plan.first.address
        self._started_s = time.monotonic()
        for its in self._agents.connections:
            slots = plan.of_host(its.host)
            self._host_of |= dict.fromkeys((slot.rank for slot in slots), its)
            own = plan.chosen[its.host.name].address
            env = plan.variables(its.host, port, master_port)
            inherits = not its.local or len(plan.hosts) == 1
            for piece in _pieces(self._job.given) if self._job.given is not None else ():
                its.send("input", data=piece)
            its.send(
                "start", argv=list(self._job.argv), cwd=self._job.cwd, defaults=plan.defaults(its.host), env=env,
                without=[] if inherits else environment.withheld(os.environ, env),
                token=self._token, own=own, peer=[first, port] if port is not None and own != first else None,
                ranks=[{"rank": slot.rank, "env": environment.of_rank(slot)} for slot in slots],
            )  # fmt: skip

    # ---- while it runs

    def _take(self, connection: Connection | None, message: Message | None) -> None:
        if connection is None:
            self._end(signal.SIGTERM)
            return
        host = connection.host.name
        if message is None:
            if not connection.ended:
                self._host_is_lost(connection, connection.problem().what)
            return
        kind = message["type"]
        if kind == "exit":
            rank = message["rank"]
            first_traceback_s, lines = self._agents.tracebacks.began_s.get(rank), tuple(self._agents.tails[rank])
            at_s = time.monotonic() - message["ago_s"]
            done = self._job.given is None or self._agents.results.get(rank) == RETURNED
            self._ends[rank] = RankEnd(rank, host, message["code"], at_s, first_traceback_s, lines, done)
        elif kind == "failed":
            self._fail(message["rank"], host, _NOT_STARTED, f"could not be started: {message['what']}")
        elif kind == "leaving":
            self._host_is_lost(connection, message["why"])
        elif kind == "cut":
            self._cut[host] = f"for {message['for_s']:.0f} s"
            self._cut_s = min(self._cut_s, time.monotonic())
        elif kind == "left":
            self.outcome.left.append(f"{host}: {message['what']}")
        elif kind == "stopped":
            why = f"stopped by a signal (SIGSTOP) for {message['for_s']:.0f} s"
            self._fail(message["rank"], host, 128 + signal.SIGSTOP, why)

    def _look_at_ranks(self) -> None:
        now, ends = time.monotonic(), list(self._ends.values())
        for its in self._agents.connections:
            if not (its.ended or its.closed) and its.silent_s() > self._job.timeouts.lost_s:
                self._host_is_lost(its, f"{its.host.name} said nothing for {its.silent_s():.0f} s")
            elif (its.ended or its.closed) and self._ranks_left(its):  # gone before its ranks were started
                self._host_is_lost(its, its.why_left or its.problem().what)
        if self._deadline_s is not None:
            return
        all_ended, first = len(ends) == self._job.np, first_failure(ends)
        if first is not None and (all_ended or settled(ends, now)):
            why = described(first.code, first.host) if first.code else "ended with exit code 0 before that"
            self._fail(first.rank, first.host, as_exit_code(first.code) or 1, why)
        elif all_ended:
            self._end(signal.SIGTERM)
        elif any(end.preempted and now - end.at_s >= self._job.timeouts.grace_s for end in ends):
            self._end(signal.SIGTERM)  # the others have had as long to end, too

    def _look_at_cuts(self) -> None:
        """Ends the job whose hosts do not reach each other any more, though the launcher reaches them."""
        others = [its.host.name for its in self._agents.connections[1:]]
        all_said = set(self._cut) >= set(others)
        if self._deadline_s is not None or not (all_said or time.monotonic() - self._cut_s >= _CUTS_S) or not self._cut:
            return
        first, (host, for_s) = self._agents.connections[0].host.name, next(iter(self._cut.items()))
        if all_said and len(others) > 1:
            why = f"no other host has reached {first} through the ranks' network {for_s}, though ssh does"
            self._fail(None, first, HOST_LOST, why)
        else:
            why = (
                f"{host} has not reached {first} through the ranks' network {for_s}, though ssh reaches both: the link"
            )
            self._fail(None, host, HOST_LOST, f"{why} of one of them, or a firewall, may be the reason")

    def _host_is_lost(self, connection: Connection, why: str) -> None:
        connection.closed = True  # it ends by itself; waiting for it would only be waiting
        ranks = self._ranks_left(connection)
        if ranks or self._deadline_s is None:
            named = f"with rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: " if ranks else ""
            self._fail(None, connection.host.name, HOST_LOST, f"lost, {named}{why}")

    def _ranks_left(self, connection: Connection) -> list[int]:
        return sorted(rank for rank, its in self._host_of.items() if its is connection and rank not in self._ends)

    def _fail(self, rank: int | None, host: str, code: int, why: str) -> None:
        """Notes why the job ends, unless it is ending already, and ends it."""
        if self._deadline_s is not None:
            return
        lines = tuple(self._agents.tails[rank]) if rank is not None else ()
        self.outcome.failed = Failure(rank, host, code, why, lines, time.monotonic() - self._started_s)
        self._end(signal.SIGTERM)

    # ---- the end

    def _end(self, number: int, *, grace_s: float | None = None, asks: bool = False) -> None:
        if self._closing:
            return
        grace_s = self._job.timeouts.grace_s if grace_s is None else grace_s
        self._agents.send("end", signal=number, grace_s=grace_s, asks=asks)
        stages = 2 if number == signal.SIGINT else 1
        deadline = time.monotonic() + stages * grace_s + 5.0
        self._deadline_s = min(deadline, self._deadline_s or deadline)

    def _look_at_signals(self) -> None:
        while self._seen < len(self._received):
            number = self._received[self._seen]
            self._seen += 1
            if number == _IGNORED:
                continue
            if number in _PASSED_ON:
                self._agents.send("signal", number=int(number))
            elif self.outcome.interrupted is not None:
                self._on_interrupt(number)
                self._end(signal.SIGTERM, grace_s=0.0)
            else:
                self.outcome.interrupted = number
                self._on_interrupt(number)
                ends = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
                self._end(ends, asks=number == signal.SIGTERM)

    def _stop_if_asked(self) -> None:
        ending = [number for number in self._received if number in _ENDING]
        if ending:
            self.outcome.interrupted = ending[0]
            raise _Interrupted


def _pieces(given: bytes) -> Iterator[str]:
    """What ranks are given, in base64; an empty input is one piece as well."""
    for start in range(0, max(len(given), 1), _PIECE_BYTES):
        yield base64.b64encode(given[start : start + _PIECE_BYTES]).decode()


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects the signals that end a job or are passed on, instead of what they do otherwise."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (*_ENDING, *_PASSED_ON, _IGNORED):
            # `nohup`, or a shell that starts in the background: what is ignored stays so
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, note)
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # then the exit codes of processes are lost
            before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
