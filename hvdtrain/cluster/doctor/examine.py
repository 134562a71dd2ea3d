"""Asks every host at once, over ssh, and gathers the findings (how: `hvdtrain.commands.doctor`)."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.cluster.doctor import findings, machine, network, software
from hvdtrain.cluster.doctor.findings import ClusterFacts, Facts, Finding
from hvdtrain.cluster.doctor.network import Links, RunFolder
from hvdtrain.cluster.hosts import addresses, probe
from hvdtrain.cluster.hosts.channel import Channel
from hvdtrain.cluster.hosts.protocol import Message
from hvdtrain.cluster.hosts.ssh import Ssh, SshProblem, are_this_machine, not_started
from hvdtrain.cluster.launch.job import Job
from hvdtrain.comm.link import encode
from hvdtrain.core.errors import ConfigError
from hvdtrain.record import stats

FLOW_S = 0.2
# packets that a firewall drops are given up after that
REACH_LIMIT_S = 2.0
FACT_LIMIT_S = 3.0
Request = Mapping[str, Any]

# Python 2 understands it as well, and says what it is. The session starts in the home folder: a random.py there must
# not be taken for Python's own.
_START = (
    "import sys; sys.path=[folder for folder in sys.path if folder];"
    " sys.version_info>=(3,6) or sys.exit('this is Python '+sys.version.split()[0]);"
    """ print(sys.argv[2][::-1]+'{"type":"hello"}'); sys.stdout.flush();"""
    " exec(compile(sys.stdin.read(int(sys.argv[1])),'probe','exec'))"
)
_END_S = 2.0
_FLUSH_EVERY_S = 0.05  # while a host has not taken all that was written


def source() -> str:
    """Returns the text of the probe."""
    files = probe.__file__, str(Path(__file__).with_name("probe_links.py"))
    parts = [Path(file).read_text(encoding="ascii") for file in files]
    return "\n".join([*parts, 'serve({"facts": facts}, sys.argv[2][::-1])', ""])


class Sessions:
    """The probes on all hosts that answer; hosts that stop answering are lost. Close them, also on Ctrl-C.

    A question to all costs its time limit at most, however many hosts hang.
    """

    def __init__(self, names: Sequence[str], python: str, ssh: Ssh) -> None:
        """Starts a probe in each host's `python`; on this machine without ssh."""
        self.alive: dict[str, Channel] = {}
        self.lost: dict[str, SshProblem] = {}  # why the others do not answer
        self._events: queue.SimpleQueue[tuple[Channel, Message | None]] = queue.SimpleQueue()
        text = source()
        argv = [python, "-c", _START, str(len(text))]
        for name, local in are_this_machine(names).items():
            try:
                self.alive[name] = Channel(name, argv, ssh, self._events.put, local=local.result())
                self.alive[name].write(text.encode())
            except ConfigError as error:
                self.lost[name] = SshProblem("unknown_name", f"{error.rule}: {error.received}", error.remedy)
            except OSError as error:
                self.lost[name] = not_started(error, name)

    def ask(self, requests: Mapping[str, Request], timeout_s: float) -> dict[str, Message]:
        """Returns the answers of the hosts that gave one; all are asked at once."""
        waiting = [name for name in requests if name in self.alive]
        for name in waiting:
            self.alive[name].write(encode(requests[name]))
        replies: dict[str, Message] = {}
        deadline = time.monotonic() + timeout_s
        while waiting:
            left_s = max(0.0, deadline - time.monotonic())
            all_written = all([self.alive[name].flush() for name in waiting])
            try:
                channel, reply = self._events.get(timeout=left_s if all_written else min(left_s, _FLUSH_EVERY_S))
            except queue.Empty:
                if left_s:
                    continue
                break
            name = channel.name
            if reply is not None and reply.get("type") == "hello":  # what waits for it is sent now
                continue
            if reply is None and name in self.alive:
                self.give_up(name, self.alive[name].problem())
            elif reply is not None and name in waiting:
                replies[name] = reply
            waiting = [other for other in waiting if other != name]
        for name in waiting:
            self.give_up(name, self.alive[name].problem())
        # one may have answered, and ended while others were waited for
        return {name: replies[name] for name in requests if name in replies and name in self.alive}

    def give_up(self, name: str, problem: SshProblem) -> None:
        """Ends one host's session: the host is lost."""
        self.lost[name] = problem
        channel = self.alive.pop(name)
        channel.kill()
        channel.close(_END_S)

    def close(self) -> None:
        """Ends all of them; returns when probes and sessions are gone."""
        channels = list(self.alive.values())
        self.alive.clear()
        with ThreadPoolExecutor(max(1, len(channels))) as pool:
            list(pool.map(lambda channel: channel.close(_END_S), channels))


@dataclass
class DoctorReport:
    """The facts, measurements and findings of one examination."""

    job: Job
    cluster: ClusterFacts
    links: Links | None = None  # None, of these two: not measured
    folder: RunFolder | None = None
    findings: list[Finding] = field(default_factory=list)  # the worst first
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Returns everything as plain data."""
        links = self.links
        return {
            "format": 1, "command": "doctor", "on": socket.gethostname(), "machine": stats.machine(),
            "hosts": {host: dict(facts) for host, facts in self.cluster.facts.items()},
            "ranks": {host.name: count for host, count in self.job.ranks.items()},
            "network": links and {
                "chosen": {host: vars(chosen) for host, chosen in links.chosen.items()},
                "reach": links.reach,
                "flows": [{"from": one, "to": other, **flow} for (one, other), flow in links.flows.items()],
            },
            "run_dir": self.folder and vars(self.folder),
            "findings": findings.as_json(self.findings),
            "exit_code": findings.exit_code(self.findings),
            "seconds": round(self.seconds, 3),
        }  # fmt: skip


def examined(job: Job, run_dir: Path | None = None, *, fast: bool = False) -> DoctorReport:
    """Examines the hosts of a job; raises ConfigError if they have fewer slots than ranks.

    Args:
        job: only `start_s` of its timeouts counts: how long a host may take to answer.
        run_dir: that runs are written to; None: "runs", as programs take it.
        fast: only what must hold before a job starts.
    """
    started = time.monotonic()
    names = [host.name for host in job.ranks]
    with contextlib.closing(Sessions(names, job.python, job.ssh)) as sessions:
        cluster = facts(sessions, job, run_dir, fast=fast)
        found = DoctorReport(job, cluster)
        everything = [*network.distinct(cluster), *software.quick(cluster), *machine.quick(cluster)]
        if not fast:
            everything += _thorough(sessions, found, run_dir)
        everything += [findings.of_ssh(host, problem) for host, problem in sessions.lost.items()]
    found.findings = findings.worst_first(everything)
    found.seconds = time.monotonic() - started
    return found


def facts(sessions: Sessions, job: Job, run_dir: Path | None = None, *, fast: bool) -> ClusterFacts:
    """Returns the facts that the hosts' probes report; hosts that do not answer are in `sessions.lost`."""
    ranks, timeout_s = {host.name: count for host, count in job.ranks.items()}, job.timeouts.start_s
    # ranks also get this machine's PYTHONPATH
    paths = [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    request = {
        "do": "facts", "fast": fast, "cwd": job.cwd, "run_dir": _run_folder(job, run_dir), "paths": paths,
        "limit_s": min(FACT_LIMIT_S, timeout_s / 2),
    }  # fmt: skip
    replies = sessions.ask(dict.fromkeys(ranks, request), timeout_s)
    for name in [name for name, reply in replies.items() if "error" in reply]:  # no facts: nothing is known of it
        what = f"{name} cannot be examined: {replies.pop(name).get('text', 'the probe failed there')}"
        fix = f"look at its limits (ulimit -a), memory and start-up files: ssh {name} 'ulimit -a'"
        sessions.give_up(name, SshProblem("other", what, fix))
    found = {name: {**reply, "local": sessions.alive[name].local} for name, reply in replies.items()}
    return ClusterFacts(found, {name: ranks[name] for name in found}, job.python)


def links(sessions: Sessions, job: Job, cluster: ClusterFacts) -> Links:
    """Returns what the network between the hosts that answered does."""
    found = Links()
    try:
        interfaces = {name: addresses.interfaces(its) for name, its in cluster.of("interfaces").items()}
        local = [name for name in cluster.facts if cluster.is_local(name)]
        found.chosen = addresses.choose(interfaces, job.network, addresses.reached(cluster.of("reached"), local))
    except ConfigError as error:
        found.no_network = error
        return found
    if len(found.chosen) < 2:
        return found
    token = secrets.token_hex(16)
    ports = _listen(sessions, found, token)
    peers = {name: [found.chosen[name].address, port] for name, port in ports.items()}
    requests = {
        name: {
            "do": "reach", "token": token, "timeout_s": REACH_LIMIT_S,
            "peers": [[other, *place] for other, place in peers.items() if other != name],
        }
        for name in cluster.facts
    }  # fmt: skip
    replies = sessions.ask(requests, 2 * REACH_LIMIT_S + job.timeouts.start_s)
    found.reach = {name: reply.get("reach", {}) for name, reply in replies.items()}
    pairs = [(start, end) for start, end in ring(list(ports)) if "seconds" in found.reach.get(start, {}).get(end, {})]
    for together in disjoint(pairs):
        found.flows |= _flows(sessions, together, peers, token)
    for pair in found.slow():  # perhaps only disturbed: measured again, alone
        again = _flows(sessions, [pair], peers, token)
        found.flows |= {key: max((found.flows[key], flow), key=_rate) for key, flow in again.items()}
    return found


def ring(names: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the pairs of neighbours, in the order that a ring all-reduce sends data; pure."""
    return [(start, end) for start, end in zip(names, [*names[1:], *names[:1]], strict=True) if start != end]


def disjoint(pairs: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Returns the pairs in groups in which no host is in two: measured together, they do not disturb; pure."""
    groups: list[list[tuple[str, str]]] = []
    for pair in pairs:
        free = [group for group in groups if not any(set(pair) & set(other) for other in group)]
        if free:
            free[0].append(pair)
        else:
            groups.append([pair])
    return groups


def folder(sessions: Sessions, job: Job, run_dir: Path | None, cluster: ClusterFacts) -> RunFolder:
    """Returns what happens when every host writes a file into the run directory; all are removed again."""
    places = {name: room["nearest"] for name, room in cluster.of("run_dir").items()}
    found = RunFolder(_run_folder(job, run_dir), asked=run_dir is not None)
    names, token, timeout_s = list(places), secrets.token_hex(8), job.timeouts.start_s
    marks = {
        name: {"do": "mark", "folder": places[name], "token": token, "index": index} for index, name in enumerate(names)
    }
    try:
        found.written = dict(sessions.ask(marks, timeout_s))
        looks = {
            name: {"do": "see", "folder": places[name], "token": token, "count": len(names)} for name in found.written
        }
        replies = sessions.ask(looks, timeout_s)
        found.seen = {name: [names[index] for index in reply["seen"]] for name, reply in replies.items()}
    finally:
        sessions.ask(dict.fromkeys(names, {"do": "unmark"}), timeout_s)
    return found


def _run_folder(job: Job, run_dir: Path | None) -> str:
    """The run directory's whole path, as it is on every host."""
    return os.path.join(job.cwd, run_dir or "runs")


def _listen(sessions: Sessions, found: Links, token: str) -> dict[str, int]:
    requests = {name: {"do": "listen", "address": its.address, "token": token} for name, its in found.chosen.items()}
    replies = sessions.ask(requests, REACH_LIMIT_S)
    found.unbound = {name: reply["text"] for name, reply in replies.items() if "port" not in reply}
    return {name: reply["port"] for name, reply in replies.items() if "port" in reply}


def _flows(
    sessions: Sessions, pairs: Sequence[tuple[str, str]], peers: Mapping[str, Sequence[Any]], token: str
) -> dict[tuple[str, str], Facts]:
    requests = {
        start: {"do": "send", "peer": peers[end], "token": token, "seconds": FLOW_S, "timeout_s": REACH_LIMIT_S}
        for start, end in pairs
    }
    replies = sessions.ask(requests, 4 * REACH_LIMIT_S)
    return {(start, end): replies[start] for start, end in pairs if start in replies}


def _rate(flow: Facts) -> float:
    return flow["bytes"] / flow["seconds"] if flow.get("seconds") else 0.0


def _thorough(sessions: Sessions, found: DoctorReport, run_dir: Path | None) -> list[Finding]:
    """Runs the checks that measure; skips a host in the remaining ones once it stops answering."""
    cluster = found.cluster
    everything = [*machine.thorough(cluster)]
    if cluster.facts:
        found.links = links(sessions, found.job, cluster)
        everything += network.network(cluster, found.links)
    found.folder = folder(sessions, found.job, run_dir, cluster)
    everything += network.folder(cluster, found.folder)
    return everything
