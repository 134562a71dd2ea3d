"""A job that continues when workers or hosts are lost or join: carries out and prints the decisions of `members`."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable
from typing import Any

from hvdtrain.cluster.hosts.hosts import Host, Slot
from hvdtrain.cluster.hosts.protocol import BEAT_S, Message
from hvdtrain.cluster.launch import members
from hvdtrain.cluster.launch.agents import Agents, Connection
from hvdtrain.cluster.launch.discovery import Discovery
from hvdtrain.cluster.launch.failures import SETTLE_S, RankEnd, as_exit_code, described, first_failure
from hvdtrain.cluster.launch.job import Job, JobPlan
from hvdtrain.cluster.launch.running import Heard, Running, places
from hvdtrain.comm import arrival
from hvdtrain.core import variables
from hvdtrain.core.errors import EXIT_CODE, HOST_LOST_CODE, HUNG_CODE, OUT_OF_STEP_CODE, PREEMPTED_CODE, ConfigError
from hvdtrain.core.version import __version__

_ENDS_THE_JOB = (EXIT_CODE, HUNG_CODE, OUT_OF_STEP_CODE)
_LAST_LINES = 10  # of a worker that is lost
_MEETING = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")


class ElasticRunning(Running):
    """An elastic job from the agents' hello to its end."""

    _members: members.Members
    _plan: JobPlan

    def __init__(self, job: Job, agents: Agents, received: list[int], heard: Heard) -> None:
        super().__init__(job, agents, received, heard)
        assert job.elastic is not None
        self._elastic = job.elastic
        self._agent_of: dict[str, Connection] = {}  # by host: the one that counts
        self._answers: list[str] = []  # pieces of what new workers read
        self._answers_of, self._whole = -1, False  # whose they are, and whether all are there
        self._lost: dict[int, RankEnd] = {}  # how workers ended that were lost
        self._last_lost: members.Lost | None = None
        self._port = 0  # of the present rendezvous
        self._peer: list[object] = []  # its address and port, as long as its host is there
        self._served_by: Connection | None = None
        self._discovery: Discovery | None = None
        self._listed: queue.SimpleQueue[list[Host]] = queue.SimpleQueue()
        self._unreached: dict[str, str] = {}  # by host: why, as it was told

    def run(self, on_plan: Callable[[JobPlan], None] | None) -> None:
        """Starts the first workers, watches and replaces them, and ends them."""
        try:
            super().run(on_plan)
        finally:
            if self._discovery is not None:
                self._discovery.close()

    def _start(self, plan: JobPlan, port: int | None) -> None:
        its, job = self._elastic, self._job
        start_s = arrival.timeout_s(os.environ)
        limits = members.Limits(its.minimum, its.maximum, its.timeout_s, start_s, open=its.discovery is not None)
        self._agent_of = {connection.host.name: connection for connection in self._agents.connections}
        self._members = members.Members(job.slots, job.hosts, limits)
        self._served_by = self._agents.connections[0]
        self._peer = [plan.first.address, port]
        super()._start(plan, port)
        if its.discovery is not None:
            self._discovery = Discovery(its.discovery, self._listed.put, self._heard.say)

    # ---- what happens

    def _take(self, connection: Connection | None, message: Message | None) -> None:
        now = time.monotonic()
        if connection is None and message is not None:
            self._reach(message)
            return
        if message is not None and message["type"] == "cut" and message["peer"] != self._peer:
            return  # it is the host of a rendezvous that is gone, and no network
        super()._take(connection, message)
        if connection is None or message is None or self._deadline_s is not None:
            return
        kind = message["type"]
        if kind == "hello":
            self._greet(connection, message)
        elif kind == "rendezvous":
            own, self._port = self._plan.chosen[connection.host.name].address, message["port"]
            self._do(self._members.served(message["serial"], own, message["port"], now))

    def _hear(self, number: int, message: dict[str, Any]) -> None:
        super()._hear(number, message)
        if self._deadline_s is not None:
            return
        now, formation = time.monotonic(), message.get("formation")
        if message.get("do") == "answers" and not self._whole:
            if number != self._answers_of:  # whoever began to say them may have been lost
                self._answers_of = number
                self._answers.clear()
            self._answers.append(str(message.get("data")))
            self._whole = bool(message.get("last"))
            if self._whole:
                for its in self._agent_of.values():
                    self._hand_answers_to(its)
                self._do(self._members.answered(now))
        elif message.get("do") == "wait" and isinstance(formation, int):
            joinable, empty = bool(message.get("joinable", True)), bool(message.get("empty"))
            self._do(self._members.waits(number, formation, now, joinable=joinable, empty=empty))
        elif message.get("do") == "hung" and formation == self._members.formation:
            hung = [its.number for its in self._members.members() if its.rank in message.get("ranks", ())]
            self._do(self._members.lost(hung, now, why="it lets the others wait: it hangs", gone=False))
        elif message.get("do") == "updates" and isinstance(formation, int):
            self._do(self._members.updated(formation, now))

    def _hand_answers_to(self, its: Connection) -> None:
        for piece in self._answers:
            its.send("answers", data=piece)

    def _reach(self, found: Message) -> None:
        """Starts the agent of a host that is wanted, now that it is known where it is."""
        host: Host = found["host"]
        try:
            if "why" in found:
                raise OSError(found["why"])
            self._agent_of[host.name] = self._agents.add(host, local=found["local"])
        except OSError as error:
            self._host_gone(host.name, str(error))

    def _greet(self, connection: Connection, hello: Message) -> None:
        """Admits a host that was reached, if its hvdtrain and its network fit the job."""
        host = connection.host
        try:
            if hello["version"] != __version__:
                raise ConfigError("hvdtrain must be the same", f"hvdtrain {hello['version']} there, {__version__} here")
            self._plan = self._plan.with_host(host, hello)
        except ConfigError as error:
            self._agents.drop(connection)
            self._host_gone(host.name, error.received)
            return

        self._unreached.pop(host.name, None)
        if self._whole:
            self._hand_answers_to(connection)
        self._do(self._members.host_there(host.name, time.monotonic()))

    def _ended(self, end: RankEnd) -> None:
        now = time.monotonic()
        if end.rank not in self._members.workers:
            self._do(self._members.gone(end.rank, now))
        elif end.code in (0, PREEMPTED_CODE):
            self._ends[end.rank] = end
            self._do(self._members.finished(end.rank, now))
        elif end.code in _ENDS_THE_JOB and self._members.workers[end.rank].member:
            self._ends[end.rank] = end  # a new one may be refused for what only its host lacks
        else:
            self._lost[end.rank] = end
            why = described(end.code, end.host)
            self._do(self._members.lost([end.rank], now, why=why, gone=True))

    def _not_started(self, rank: int | None, host: str, what: str) -> None:
        if rank is None or rank not in self._members.workers:
            self._fail(None, host, HOST_LOST_CODE, f"Horovod's rendezvous: {what}")
        else:
            why = f"could not be started: {what}"
            self._do(self._members.lost([rank], time.monotonic(), why=why, gone=True))

    def _stopped(self, rank: int, host: str, why: str) -> None:
        self._do(self._members.lost([rank], time.monotonic(), why=why, gone=False))

    def _host_is_lost(self, connection: Connection, why: str) -> None:
        if self._agent_of.get(connection.host.name) is connection:
            self._agents.drop(connection)
            self._host_gone(connection.host.name, why)

    def _ranks_left(self, connection: Connection) -> list[int]:
        return [number for number in self._members.workers if self._host_of.get(number) is connection]

    def _host_gone(self, name: str, why: str) -> None:
        self._agent_of.pop(name, None)
        self._forget_cuts()
        if self._served_by is not None and self._served_by.host.name == name:
            self._peer = []
        used = any(its.host == name for its in self._members.workers.values())
        if self._deadline_s is None and (used or self._unreached.get(name) != why):
            self._unreached[name] = why
            self._heard.say(f"host {name} {'is lost' if used else 'cannot be used'}: {why}")
        self._do(self._members.host_gone(name, time.monotonic(), why=f"host {name} is lost"))

    def _look_at_cuts(self) -> None:
        served_by = self._served_by
        if served_by is None or served_by.silent_s() < 1.5 * BEAT_S:  # else it is that host, and not the network
            super()._look_at_cuts()

    def _cut_off(self, host: str, why: str) -> None:
        if host in self._agent_of:
            self._host_is_lost(self._agent_of[host], why)

    def _in_network(self) -> list[str]:
        first = [self._served_by.host.name] if self._served_by is not None else []
        return list(dict.fromkeys([*first, *(its.host for its in self._members.members())]))

    def _look_at_ranks(self) -> None:
        self._look_at_hosts()
        while not self._listed.empty():
            self._do(self._members.offered(self._listed.get(), time.monotonic()))
        if self._deadline_s is not None:
            return
        now, ends = time.monotonic(), self._ends.values()
        first = first_failure([end for end in ends if end.code in _ENDS_THE_JOB])
        if first is not None and now - first.at_s >= SETTLE_S:
            self._fail(first.rank, first.host, as_exit_code(first.code), described(first.code, first.host))
        elif self._members.over and (self._members.well or any(end.preempted for end in ends)):
            self._end(signal.SIGTERM)
        elif self._members.over:
            self._give_up("rank 0 did not come to its end, though others did")
        elif any(end.preempted and now - end.at_s >= self._job.timeouts.grace_s for end in ends):
            self._end(signal.SIGTERM)  # the others have had as long to end, too
        else:
            self._do(self._members.tick(now))

    # ---- what is done

    def _do(self, todo: list[members.Action]) -> None:
        for action in todo:
            if self._deadline_s is not None:
                return
            match action:
                case members.ReachHost(host):
                    self._agents.find(host)
                case members.StartWorker(number, host, slot):
                    self._start_one(number, host, slot)
                case members.Signal(number, sent):
                    if sent == signal.SIGTERM:  # else it waits for an update with the others
                        self._host_of[number].send("tell", rank=number, say={"do": "dismiss"})
                    self._host_of[number].send("signal", number=sent, rank=number)
                case members.Say(number, message):
                    self._host_of[number].send("tell", rank=number, say=message)
                case members.Serve(serial, host, slots):
                    self._serve(self._agent_of[host], serial, slots)
                case members.Unserve():
                    self._unserve()
                case members.Lost():
                    self._tell_lost(action)
                case members.Formed():
                    self._tell_formed(action)
                case members.Fail(why):
                    self._give_up(why)

    def _start_one(self, number: int, host: Host, slot: int) -> None:
        its, plan = self._agent_of[host.name], self._plan
        all_env = plan.variables(host, 0, self._master_port)
        env = {name: value for name, value in all_env.items() if name not in _MEETING}
        own = {"HOROVOD_HOSTNAME": host.address, variables.ELASTIC: "new", variables.ELASTIC_SIZE: str(self._job.np)}
        own[variables.ELASTIC_SLOT] = f"{slot}/{host.slots}"
        self._heard.worker(number, host)
        self._heard.say(f"worker {number} starts on {host.name}")
        self._start_on(its, plan, env, {number: own}, None)

    def _serve(self, its: Connection, serial: int, slots: tuple[Slot, ...]) -> None:
        if its is not self._served_by:
            self._unserve()
        self._served_by = its
        own = self._plan.chosen[its.host.name].address
        its.send("rendezvous", address=own, places=places(slots), serial=serial)

    def _unserve(self) -> None:
        if self._served_by is not None:
            self._served_by.send("rendezvous", address="", places=None)

    def _tell_lost(self, lost: members.Lost) -> None:
        self._last_lost = lost
        end = self._lost.get(lost.number)
        lines = list(end.lines[-_LAST_LINES:]) if end is not None and end.code > 0 else []
        words = "".join(f"\n  | {line}" for line in lines)
        self._heard.say(f"worker {lost.number} on {lost.host} lost: {lost.why}{words}")
        record = {"worker": lost.number, "host": lost.host, "why": lost.why, "formation": self._members.formation}
        self.outcome.lost.append({**record, "after_s": self._after_s()})

    def _tell_formed(self, formed: members.Formed) -> None:
        size = len(formed.numbers)
        hosts = {slot.host.name: slot.local_size for slot in formed.slots}
        where = ", ".join(f"{name}: {count}" for name, count in hosts.items())
        ranks = f"{size} rank{'s' * (size > 1)}"
        self._heard.say(f"continuing with {ranks} (formation {formed.formation}; {where})")
        record = {"formation": formed.formation, "workers": list(formed.numbers), "hosts": hosts}
        self.outcome.formations.append({**record, "after_s": self._after_s(), "took_s": round(formed.after_s, 3)})
        self._forget_cuts()
        first = self._plan.chosen[formed.slots[0].host.name].address
        self._peer = [first, self._port]
        for name in hosts:
            own = self._plan.chosen[name].address
            self._agent_of[name].send("peer", own=own, peer=self._peer if own != first else None)

    def _forget_cuts(self) -> None:
        self._cut.clear()
        self._cut_s = float("inf")

    def _after_s(self) -> float:
        return round(time.monotonic() - self._started_s, 3)

    # ---- why it ends

    def _give_up(self, why: str) -> None:
        """Ends the job, and blames the workers that were lost in the last formation."""
        lost = self._last_lost
        formation = self.outcome.lost[-1]["formation"] if self.outcome.lost else 0
        last = [its["worker"] for its in self.outcome.lost if its["formation"] == formation]
        first = first_failure([self._lost[number] for number in last if number in self._lost])
        if first is not None:
            why = f"{described(first.code, first.host)}; {why}"
            self._fail(first.rank, first.host, as_exit_code(first.code) or 1, why)
        elif lost is not None:
            self._fail(None, lost.host, HOST_LOST_CODE, f"worker {lost.number}: {lost.why}; {why}")
        else:
            self._fail(None, self._agents.connections[0].host.name, 1, why)
