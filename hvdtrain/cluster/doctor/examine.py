"""Asking all hosts at once: what they are, what the network between them does, whether they share a folder."""

from __future__ import annotations

import ipaddress
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any

from hvdtrain.cluster import addresses
from hvdtrain.cluster.doctor.checks import Facts, Known
from hvdtrain.cluster.doctor.network import Folder, Links
from hvdtrain.cluster.doctor.sessions import Sessions
from hvdtrain.cluster.hosts import Host, Slot, assign
from hvdtrain.cluster.launch.job import working_directory
from hvdtrain.cluster.ssh import Ssh, SshProblem
from hvdtrain.core.errors import ConfigError

FLOW_S = 0.2
# packets that a firewall drops are given up after that
REACH_LIMIT_S = 2.0
FACT_LIMIT_S = 3.0
_CLOCK_READINGS = 3


@dataclass(frozen=True)
class Question:
    """What is to be examined.

    Attributes:
        hosts: in the user's order; the first one's ranks come first.
        np: how many ranks; None: one for every slot.
        python: the interpreter on other hosts.
        ssh: how they are reached.
        network: that the ranks shall use; None: chosen.
        run_dir: that runs are written to; None: "runs", as programs take it.
        timeout_s: that a host may take to answer.
        cwd: the folder that ranks start in.
        paths: put in front of every host's `sys.path`, as PYTHONPATH is for ranks.
    """

    hosts: Sequence[Host]
    np: int | None = None
    python: str = ""
    ssh: Ssh = field(default_factory=Ssh)
    network: str | None = None
    run_dir: Path | None = None
    timeout_s: float = 6.0
    cwd: str = field(default_factory=working_directory)
    paths: Sequence[str] = ()

    @property
    def run_folder(self) -> str:
        """The run directory's whole path, as it is on every host."""
        return os.path.join(self.cwd, self.run_dir or "runs")

    @property
    def slots(self) -> list[Slot]:
        """Every rank's place."""
        return assign(self.hosts, self.np or sum(host.slots for host in self.hosts))

    @property
    def taking_part(self) -> dict[str, int]:
        """The hosts that have ranks, and how many."""
        return {slot.host.name: slot.local_size for slot in self.slots}


def facts(talk: Sessions, question: Question, *, fast: bool) -> Known:
    """Return what the hosts say about themselves; those that do not answer are in `talk.lost`."""
    names = list(question.taking_part)
    talk.open(names, question.python, question.ssh)
    request = {
        "do": "facts", "fast": fast, "cwd": question.cwd, "run_dir": question.run_folder, "paths": list(question.paths),
        "limit_s": min(FACT_LIMIT_S, question.timeout_s / 2),
    }  # fmt: skip
    replies = talk.ask(dict.fromkeys(names, request), question.timeout_s)
    for name in [name for name, reply in replies.items() if "error" in reply]:  # no facts: nothing is known of it
        what = f"{name} cannot be examined: {replies.pop(name).get('text', 'the probe failed there')}"
        fix = f"look at its limits (ulimit -a), memory and start-up files: ssh {name} 'ulimit -a'"
        talk.give_up(name, SshProblem("other", what, fix))
    found = {name: reply | {"local": talk.alive[name].local} for name, reply in replies.items()}
    return Known(found, {name: question.taking_part[name] for name in found}, question.python)


def links(talk: Sessions, question: Question, cluster: Known) -> Links:
    """Return what the network between the hosts that answered does."""
    found = Links()
    _read_clocks(talk, cluster, found)
    try:
        found.chosen = addresses.choose(_interfaces(cluster), question.network, _reached(cluster))
    except ConfigError as error:
        found.no_network = error
        return found
    if len(found.chosen) < 2:
        return found
    token = secrets.token_hex(16)
    ports = _listen(talk, found, token)
    peers = {name: [found.chosen[name].address, port] for name, port in ports.items()}
    requests = {
        name: {
            "do": "reach", "token": token, "timeout_s": REACH_LIMIT_S,
            "peers": [[other, *place] for other, place in peers.items() if other != name],
        }
        for name in cluster.facts
    }  # fmt: skip
    replies = talk.ask(requests, 2 * REACH_LIMIT_S + question.timeout_s)
    found.reach = {name: reply.get("reach", {}) for name, reply in replies.items()}
    pairs = [(start, end) for start, end in ring(list(ports)) if "seconds" in found.reach.get(start, {}).get(end, {})]
    for together in disjoint(pairs):
        found.flows |= _flows(talk, together, peers, token)
    for pair in found.slow():  # perhaps only disturbed: measured again, alone
        again = _flows(talk, [pair], peers, token)
        found.flows |= {key: max((found.flows[key], flow), key=_rate) for key, flow in again.items()}
    return found


def ring(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of neighbours, in the order that a ring all-reduce sends data; pure."""
    return [(start, end) for start, end in zip(names, [*names[1:], *names[:1]], strict=True) if start != end]


def disjoint(pairs: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Return the pairs in groups in which no host is in two: measured together, they do not disturb; pure."""
    groups: list[list[tuple[str, str]]] = []
    for pair in pairs:
        free = [group for group in groups if not any(set(pair) & set(other) for other in group)]
        if free:
            free[0].append(pair)
        else:
            groups.append([pair])
    return groups


def folder(talk: Sessions, question: Question, cluster: Known) -> Folder:
    """Return what happens when every host writes a file into the run directory; all are removed again."""
    places = {name: room["nearest"] for name, room in cluster.of("run_dir").items()}
    found = Folder(question.run_folder, asked=question.run_dir is not None)
    names, token = list(places), secrets.token_hex(8)
    marks = {
        name: {"do": "mark", "folder": places[name], "token": token, "index": index}
        for index, name in enumerate(names)
    }  # fmt: skip
    try:
        found.written = dict(talk.ask(marks, question.timeout_s))
        looks = {
            name: {"do": "see", "folder": places[name], "token": token, "count": len(names)} for name in found.written
        }
        replies = talk.ask(looks, question.timeout_s)
        found.seen = {name: [names[index] for index in reply["seen"]] for name, reply in replies.items()}
    finally:
        talk.ask(dict.fromkeys(names, {"do": "unmark"}), question.timeout_s)
    return found


# -- inside ---------------------------------------------------------------------------------------------------
def _read_clocks(talk: Sessions, cluster: Known, found: Links) -> None:
    """How far each clock is ahead of ours: the reading with the shortest way there and back is the best one."""
    for name in cluster.facts:
        if cluster.is_local(name) or name not in talk.alive:
            continue
        best: tuple[float, float] | None = None
        for _ in range(_CLOCK_READINGS):
            before = time.time()
            reply = talk.ask({name: {"do": "clock"}}, 1.0)
            after = time.time()
            if name in reply:
                reading = (reply[name]["time"] - (before + after) / 2, (after - before) / 2)
                best = min(best or reading, reading, key=lambda item: item[1])
        if best is not None:
            found.clocks[name] = best


def _interfaces(cluster: Known) -> dict[str, dict[str, list[IPv4Interface]]]:
    every: dict[str, dict[str, list[IPv4Interface]]] = {}
    for name, its in cluster.of("interfaces").items():
        mine = every.setdefault(name, {})
        for one in its:
            if one["up"]:
                mine.setdefault(one["name"], []).append(ipaddress.IPv4Interface(f"{one['address']}/{one['prefix']}"))
    return every


def _reached(cluster: Known) -> dict[str, str]:
    """The address that the connection to each host ended at, this machine's own towards them included."""
    reached = {name: address for name, address in cluster.of("reached").items() if not cluster.is_local(name)}
    for name in cluster.facts:
        if cluster.is_local(name) and reached:
            own = addresses.source_towards(next(iter(reached.values())))
            reached |= {name: own} if own else {}
    return reached


def _listen(talk: Sessions, found: Links, token: str) -> dict[str, int]:
    requests = {
        name: {"do": "listen", "addresses": [chosen.address], "token": token} for name, chosen in found.chosen.items()
    }
    ports: dict[str, int] = {}
    for name, reply in talk.ask(requests, REACH_LIMIT_S).items():
        address = found.chosen[name].address
        if address in reply.get("ports", {}):
            ports[name] = reply["ports"][address]
        else:
            found.unbound[name] = reply.get("errors", {}).get(address, reply.get("text", "no answer"))
    return ports


def _flows(
    talk: Sessions, pairs: Sequence[tuple[str, str]], peers: Mapping[str, Sequence[Any]], token: str
) -> dict[tuple[str, str], Facts]:
    requests = {
        start: {"do": "send", "peer": peers[end], "token": token, "seconds": FLOW_S, "timeout_s": REACH_LIMIT_S}
        for start, end in pairs
    }
    replies = talk.ask(requests, 4 * REACH_LIMIT_S)
    return {(start, end): replies[start] for start, end in pairs if start in replies}


def _rate(flow: Facts) -> float:
    return flow["bytes"] / flow["seconds"] if flow.get("seconds") else 0.0
