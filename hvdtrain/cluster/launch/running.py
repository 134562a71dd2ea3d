"""One job from the agents' hello to its end: its ranks are started together, watched, and ended together."""

from __future__ import annotations

import base64
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.cluster.hosts import addresses
from hvdtrain.cluster.hosts.hosts import Host, Slot
from hvdtrain.cluster.hosts.protocol import Message
from hvdtrain.cluster.launch import environment
from hvdtrain.cluster.launch.agents import Agents, Connection
from hvdtrain.cluster.launch.failures import (
    Failure,
    RankEnd,
    as_exit_code,
    described,
    first_failure,
    left_the_others,
    settled,
)
from hvdtrain.cluster.launch.job import Job, JobPlan, make_plan
from hvdtrain.cluster.launch.rank import PASSED_ON, RETURNED
from hvdtrain.core import variables
from hvdtrain.core.errors import HOST_LOST_CODE, NOT_STARTED_CODE, PREEMPTED_CODE, LauncherError
from hvdtrain.core.slurm import port_of

TICK_S = 0.1
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
IGNORED = signal.SIGTSTP  # Ctrl-Z: hosts would take a launcher that is suspended for dead
_CUTS_S = 5.0  # that other hosts have to say so, too, once one is cut off the ranks' network
_NO_LINK = "two hosts may not reach each other (hvdtrain doctor -H ... tries all links)"
_PIECE_BYTES = 3 << 16  # of a rank's input in one message


@dataclass
class Outcome:
    """The outcome of a job."""

    failed: Failure | None = None  # None: every rank ended well, or the user ended the job
    interrupted: int | None = None  # the signal by which the user ended it
    preempted: bool = False
    signalled: int | None = None  # a signal passed on by the launcher: ranks were to end by it, or one has ended
    formations: list[dict[str, Any]] = field(default_factory=list)  # of an elastic job, beyond the first
    lost: list[dict[str, Any]] = field(default_factory=list)  # workers of an elastic job
    updates: int = 0  # counted through the whole run, as far as ranks reported them
    left: list[str] = field(default_factory=list)  # processes that the agents may not end, in words
    seconds: float = 0.0  # from the ranks' start to the end of the last

    @property
    def exit_code(self) -> int:
        """Returns 0, the first failing rank's code, 85 for preempted ranks, or 128+N if signal N ended the job."""
        if self.failed is not None:
            return self.failed.code
        if self.preempted:
            return PREEMPTED_CODE
        return 128 + self.interrupted if self.interrupted is not None else 0


class Heard:
    """Gets what happens while a job runs; does nothing with it."""

    def interrupt(self, number: int) -> None:
        """Takes a signal that ends the job; more may follow."""

    def worker(self, number: int, host: Host) -> None:
        """Takes a worker of an elastic job that is about to start."""

    def say(self, text: str) -> None:
        """Takes a change of an elastic job."""


class Interrupted(Exception):
    """The user ended the job before its ranks were started."""


def plan_of(job: Job, agents: Agents) -> JobPlan:
    hellos = {its.host.name: its.hello or {} for its in agents.connections}
    local = [its.host.name for its in agents.connections if its.local]
    reached = addresses.reached({name: hello["reached"] for name, hello in hellos.items()}, local)
    return make_plan(job, hellos, reached, local)


class Running:
    """A job from the agents' hello to its end; once it is closed, `outcome` is complete."""

    def __init__(self, job: Job, agents: Agents, received: list[int], heard: Heard) -> None:
        self._job, self._agents, self._received, self._heard = job, agents, received, heard
        self.outcome = Outcome()
        self._ends: dict[int, RankEnd] = {}
        self._deadline_s: float | None = None  # of the end, once it has begun
        self._seen = 0  # of the received signals
        self._passed: set[int] = set()  # signals that the ranks have got
        self._started_s = time.monotonic()
        self._host_of: dict[int, Connection] = {}
        self._master_port = port_of(uuid.uuid4().hex)
        self._cut: dict[str, str] = {}  # by host: that it does not reach the first one any more
        self._cut_s = float("inf")  # when the first of them reported it
        self._closing = False

    def run(self, on_plan: Callable[[JobPlan], None] | None) -> None:
        """Starts the ranks, watches them, and ends them."""
        agents, job = self._agents, self._job
        agents.meet(self._stop_if_asked)
        plan = plan_of(job, agents)
        if on_plan is not None:
            on_plan(plan)
        port = self._rendezvous(plan) if job.horovod else None
        self._start(plan, port)
        while not all(its.ended or its.closed for its in agents.connections):
            self._look_at_signals()
            if (event := agents.next(TICK_S)) is not None:
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
        self._agents.close(wait_s, look=self._look_at_signals)

    # ---- the start

    def _rendezvous(self, plan: JobPlan) -> int:
        """Has the first host serve Horovod's rendezvous; returns its port."""
        first = self._agents.connections[0]
        first.send("rendezvous", address=plan.chosen[first.host.name].address, places=places(self._job.slots))
        deadline = time.monotonic() + self._job.timeouts.start_s
        while time.monotonic() < deadline:
            self._stop_if_asked()
            connection, message = self._agents.next(TICK_S) or (None, None)
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

    def _start(self, plan: JobPlan, port: int | None) -> None:
        self._plan, first = plan, plan.first.address
        self._started_s = time.monotonic()
        for its in self._agents.connections:
            for piece in pieces(self._job.given) if self._job.given is not None else ():
                its.send("input", data=piece)
            peer = [first, port] if port is not None and plan.chosen[its.host.name].address != first else None
            env = plan.variables(its.host, port, self._master_port)
            more = {variables.ELASTIC: "1"} if self._job.elastic is not None else {}
            ranks = {slot.rank: environment.of_rank(slot) | more for slot in plan.of_host(its.host)}
            self._start_on(its, plan, env, ranks, peer)

    def _start_on(
        self,
        its: Connection,
        plan: JobPlan,
        env: dict[str, str],
        ranks: dict[int, dict[str, str]],
        peer: list[object] | None,
    ) -> None:
        self._host_of |= dict.fromkeys(ranks, its)
        its.token = its.token or uuid.uuid4().hex
        inherits = not its.local or self._job.one_host
        without = [] if inherits else environment.withheld(os.environ, env)
        its.send(
            "start", argv=list(self._job.argv), cwd=self._job.cwd, defaults=plan.defaults(its.host), env=env,
            without=[*without, *variables.ELASTIC_JOB],  # of a job that started this one
            token=its.token, own=plan.chosen[its.host.name].address, peer=peer,
            ranks=[{"rank": rank, "env": own} for rank, own in ranks.items()],
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
            self._note_signal(-message["code"])
            done = self._job.given is None or self._agents.results.get(rank) == RETURNED
            self._ended(RankEnd(rank, host, message["code"], at_s, first_traceback_s, lines, done))
        elif kind == "worker":
            self._hear(message["rank"], message["said"])
        elif kind == "failed":
            self._not_started(message["rank"], host, message["what"])
        elif kind == "leaving":
            self._host_is_lost(connection, message["why"])
        elif kind == "cut":
            self._cut[host] = f"for {message['for_s']:.0f} s"
            self._cut_s = min(self._cut_s, time.monotonic())
        elif kind == "left":
            self.outcome.left.append(f"{host}: {message['what']}")
        elif kind == "stopped":
            why = f"stopped by a signal (SIGSTOP) for {message['for_s']:.0f} s"
            self._stopped(message["rank"], host, why)

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        if message.get("do") == "updates" and isinstance(message.get("count"), int):
            self.outcome.updates = max(self.outcome.updates, message["count"])
        elif message.get("do") == "signalled":
            self._note_signal(message.get("signal"))

    def _note_signal(self, number: int | None) -> None:
        if number in self._passed:  # else another process has sent it to one rank
            self.outcome.signalled = number

    def _ended(self, end: RankEnd) -> None:
        self._ends[end.rank] = end

    def _not_started(self, rank: int | None, host: str, what: str) -> None:
        self._fail(rank, host, NOT_STARTED_CODE, f"could not be started: {what}")

    def _stopped(self, rank: int, host: str, why: str) -> None:
        self._fail(rank, host, 128 + signal.SIGSTOP, why)

    def _look_at_hosts(self) -> None:
        for its in self._agents.connections:
            if not (its.ended or its.closed) and its.silent_s() > self._job.timeouts.lost_s:
                self._host_is_lost(its, f"{its.host.name} sent nothing for {its.silent_s():.0f} s")
            elif (its.ended or its.closed) and self._ranks_left(its):  # gone before its ranks were started
                self._host_is_lost(its, its.why_left or its.problem().what)

    def _look_at_ranks(self) -> None:
        self._look_at_hosts()
        now, ends = time.monotonic(), list(self._ends.values())
        if self._deadline_s is not None:
            return
        all_ended, first = len(ends) == self._job.np, first_failure(ends)
        blamed = left_the_others(first, ends) if first is not None else None
        if first is not None and (all_ended or settled(ends, now)):
            why = described(first.code, first.host) if first.code else "ended with exit code 0 before that"
            if blamed is not None:
                why = (
                    f"ended with exit code 0 while others continued; rank {first.rank} on {first.host}, which lacked"
                    f" it: {why}"
                )
            blamed = blamed or first
            if blamed.is_consequence and not self._job.one_host:
                why = f"{why}; {_NO_LINK}"
            self._fail(blamed.rank, blamed.host, as_exit_code(first.code) or 1, why)
        elif all_ended:
            self._end(signal.SIGTERM)
        elif any(end.preempted and now - end.at_s >= self._job.timeouts.grace_s for end in ends):
            self._end(signal.SIGTERM)  # the others have had as long to end, too

    def _look_at_cuts(self) -> None:
        """Ends the job whose hosts do not reach each other any more, though the launcher reaches them."""
        first, *others = self._in_network()
        all_said = set(self._cut) >= set(others)
        if self._deadline_s is not None or not (all_said or time.monotonic() - self._cut_s >= _CUTS_S) or not self._cut:
            return
        host, for_s = next(iter(self._cut.items()))
        if all_said and len(others) > 1:
            why = f"no other host has reached {first} through the ranks' network {for_s}, though ssh does"
            self._cut_off(first, why)
        else:
            why = (
                f"{host} has not reached {first} through the ranks' network {for_s}, though ssh reaches both: the link"
            )
            self._cut_off(host, f"{why} of one of them, or a firewall, may be the reason")

    def _in_network(self) -> list[str]:
        """The hosts that ranks are on, the rendezvous' first."""
        return [its.host.name for its in self._agents.connections]

    def _cut_off(self, host: str, why: str) -> None:
        self._fail(None, host, HOST_LOST_CODE, why)

    def _host_is_lost(self, connection: Connection, why: str) -> None:
        connection.closed = True  # it ends by itself; waiting for it would only be waiting
        ranks = self._ranks_left(connection)
        if ranks or self._deadline_s is None:
            named = f"with rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: " if ranks else ""
            self._fail(None, connection.host.name, HOST_LOST_CODE, f"lost, {named}{why}")

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
        self._agents.send("end", signal=number, grace_s=grace_s, asks=asks, well=self.outcome.failed is None)
        stages = 2 if number == signal.SIGINT else 1
        deadline = time.monotonic() + stages * grace_s + 5.0
        self._deadline_s = min(deadline, self._deadline_s or deadline)

    def _look_at_signals(self) -> None:
        while self._seen < len(self._received):
            number = self._received[self._seen]
            self._seen += 1
            if number == IGNORED:
                continue
            if number in PASSED_ON:
                self._passed.add(int(number))
                self._agents.send("signal", number=int(number))
                self._heard.say(f"{signal.Signals(number).name} is passed on to the ranks, once they handle it")
            elif self.outcome.interrupted is not None:
                self._heard.interrupt(number)
                self._end(signal.SIGTERM, grace_s=0.0)
            else:
                self.outcome.interrupted = number
                self._heard.interrupt(number)
                ends = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
                self._end(ends, asks=number == signal.SIGTERM)

    def _stop_if_asked(self) -> None:
        ending = [number for number in self._received if number in ENDING]
        if ending:
            self.outcome.interrupted = ending[0]
            raise Interrupted


def places(slots: Sequence[Slot]) -> list[tuple[str, int, int, int, int, int, int]]:
    """Returns what Horovod's rendezvous has to know of ranks."""
    return [(s.host.address, s.rank, s.local_rank, s.cross_rank, s.size, s.local_size, s.cross_size) for s in slots]


def pieces(given: bytes) -> Iterator[str]:
    """Yields the ranks' input in base64, in pieces; an empty input is also one piece."""
    for start in range(0, max(len(given), 1), _PIECE_BYTES):
        yield base64.b64encode(given[start : start + _PIECE_BYTES]).decode()
