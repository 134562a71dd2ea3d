"""Names, addresses and links of the hosts, and the folder they share."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.cluster.doctor.findings import FULL_BYTES, ClusterFacts, Facts, Finding, Severity, known
from hvdtrain.cluster.hosts.addresses import Chosen
from hvdtrain.core.errors import ConfigError

SLOW_BYTES_PER_S = 1e8 / 8  # 100 Mbit/s: the gradients of ResNet-50 (100 MB) take 16 s a step
SLOW_SHARE, FAST_ENOUGH_BYTES_PER_S = 0.25, 2e9 / 8
GIGABIT = 1e9 / 8


@dataclass
class Links:
    """The measurements of the hosts' network.

    Attributes:
        unbound: addresses that a host could not open a port on: {host: text}.
        reach: {from: {to: {"seconds", "source"} or {"error", "text"}}}: the round trip of one byte.
        flows: {(from, to): {"bytes", "seconds"} or {"error", "text"}}: the bytes received in that time.
    """

    chosen: Mapping[str, Chosen] = field(default_factory=dict)  # the interface and address that each host would use
    no_network: ConfigError | None = None  # why none could be chosen
    unbound: dict[str, str] = field(default_factory=dict)
    reach: dict[str, dict[str, Facts]] = field(default_factory=dict)
    flows: dict[tuple[str, str], Facts] = field(default_factory=dict)

    def rates(self) -> dict[tuple[str, str], float]:
        """Returns the bytes a second of every flow that was measured."""
        return {pair: flow["bytes"] / flow["seconds"] for pair, flow in self.flows.items() if flow.get("seconds")}

    def replies(self) -> Iterator[tuple[str, str, Facts]]:
        """Yields from, to and the reply of each pair that was tried."""
        for start, replies in self.reach.items():
            for end, reply in replies.items():
                yield start, end, reply

    def slow(self) -> list[tuple[str, str]]:
        """Returns the pairs whose flow is slow: below an absolute limit, or far below the median flow."""
        rates = self.rates()
        usual = statistics.median(rates.values()) if len(rates) > 2 else 0.0
        limit = max(SLOW_BYTES_PER_S, min(SLOW_SHARE * usual, FAST_ENOUGH_BYTES_PER_S))
        return [pair for pair, rate in rates.items() if rate < limit]


@dataclass
class RunFolder:
    """The result of a test in which every host writes a file into the run directory.

    Attributes:
        written: the result of writing each host's own file: {} or {"error", "errno"}.
    """

    path: str
    asked: bool = True  # the user named it: it should be shared
    written: dict[str, Facts] = field(default_factory=dict)
    seen: dict[str, list[str]] = field(default_factory=dict)  # the hosts whose files each host sees there


def distinct(cluster: ClusterFacts) -> Iterator[Finding]:
    """Yields findings on hosts that are the same machine, and on machines that have the same name."""
    by_machine: dict[Any, list[str]] = defaultdict(list)
    by_name: dict[str, list[str]] = defaultdict(list)
    for host, system in cluster.of("system").items():
        addresses = frozenset(
            its["address"]
            for its in known(cluster.facts[host], "interfaces") or []
            if not its["address"].startswith("127.")
        )
        by_machine[system["boot_id"], addresses, system["hostname"]].append(host)
        by_name[system["hostname"]].append(host)
    for (_, _, name), hosts in by_machine.items():
        if len(hosts) > 1:
            slots = sum(cluster.ranks[host] for host in hosts)
            yield Finding(
                "same-machine", "error", tuple(hosts), f"{' and '.join(hosts)} are the same machine ({name})",
                "its ranks would take themselves for those of several hosts, and fight for the same GPUs and cores",
                f"name it once, with all its slots: -H {hosts[0]}:{slots}",
            )  # fmt: skip
            by_name[name] = [host for host in by_name[name] if host not in hosts[1:]]
    for name, hosts in by_name.items():
        if len(hosts) > 1:
            yield Finding(
                "duplicate-names", "error", tuple(hosts), f"{' and '.join(hosts)} all call themselves {name!r}",
                "Horovod and hvdtrain count the ranks of a host by its name: local ranks, and so GPUs, would be wrong",
                "\n".join(
                    [cluster.on(its, "hostnamectl", "set-hostname", its.rpartition("@")[2]) for its in hosts[1:4]]
                    + ["and so on"] * (len(hosts) > 4)
                ),
            )  # fmt: skip


def network(cluster: ClusterFacts, links: Links) -> Iterator[Finding]:
    """Yields the findings from all measurements between the hosts."""
    if links.no_network is not None:
        yield Finding(
            "no-common-network", "error", (), f"{links.no_network.rule}\n{links.no_network.received}",
            "ranks connect to each other directly", links.no_network.remedy,
        )  # fmt: skip
    for host, error in links.unbound.items():
        yield Finding(
            "no-port", "error", (host,), f"no port can be opened on {links.chosen[host].address}: {error}",
            "ranks listen for each other there", f"{cluster.on(host, 'ip', 'address')} shows its addresses",
        )  # fmt: skip
    yield from _unreached(cluster, links)
    yield from _speed(cluster, links)


_REACH: dict[str, tuple[str, str]] = {
    "no route": ("no-route", "{} has no route to {}, or a firewall reports that it has none"),
    "refused": ("closed-port", "{} is refused by {}: a firewall, as a port was open"),
    "timeout": ("closed-port", "{} gets no answer from {}: packets are dropped"),
    "forbidden": ("closed-port", "{} may not connect to {}: its own firewall"),
    "silent": ("silent-network", "{} connects to {}, but data does not pass"),
    "other": ("closed-port", "{} cannot talk to {}"),
}
_WHY_REACH = "every rank connects to every other one, on ports that the kernel picks: a job would hang at its start"


def _unreached(cluster: ClusterFacts, links: Links) -> Iterator[Finding]:
    """Yields findings on pairs that do not reach each other, one for each host that most of them have in common."""
    failed = {(start, end, reply["error"]) for start, end, reply in links.replies() if "error" in reply}
    # a host that has no route to another one cannot answer it either
    failed -= {(end, start, "timeout") for start, end, kind in failed if kind in ("no route", "forbidden")}
    while failed:
        counts = Counter(host for start, end, _ in failed for host in (start, end))
        order = list(cluster.facts)
        culprit = max(counts, key=lambda host: (counts[host], -order.index(host)))
        mine = {item for item in failed if culprit in item[:2]}
        failed -= mine
        kinds = sorted({kind for _, _, kind in mine}, key=list(_REACH).index)
        for kind in kinds:
            pairs = sorted((start, end) for start, end, its in mine if its == kind)
            yield _no_way(cluster, links, culprit, kind, pairs)


def _no_way(cluster: ClusterFacts, links: Links, culprit: str, kind: str, pairs: list[tuple[str, str]]) -> Finding:
    id_, words = _REACH[kind]
    start, end = pairs[0]
    address = links.chosen[end].address
    what = "; ".join(
        f"{words.format(one, other)} ({links.chosen[other].address}: {links.reach[one][other]['text']})"
        for one, other in pairs[:4]
    ) + (f"; and {len(pairs) - 4} more" if len(pairs) > 4 else "")
    others = ",".join(sorted(chosen.address for host, chosen in links.chosen.items() if host != end))
    fixes = {
        "no-route": f"{cluster.on(start, 'ip', 'route', 'get', address)} shows the way it takes; give it one:"
        f" {cluster.on(start, 'ip', 'route', 'add', address, 'via', 'GATEWAY')}; or use another network: --network",
        "closed-port": "let the hosts connect to each other on all ports:"
        f" {cluster.on(end, 'iptables', '-I', 'INPUT', '-p', 'tcp', '-s', others, '-j', 'ACCEPT')}"
        f"\n(firewalld: firewall-cmd --zone=trusted --add-source={others.partition(',')[0]}); or use another network:"
        " --network",
        "silent-network": f"{_ping(cluster, start, address)} shows the size that passes; lower the MTU to it",
    }
    hosts = tuple(dict.fromkeys((culprit, *(host for pair in pairs for host in pair))))
    return Finding(id_, "error", hosts, what, _WHY_REACH, fixes[id_])


def _ping(cluster: ClusterFacts, start: str, address: str) -> str:
    """The command that sends a packet of Ethernet's usual size, not to be cut into pieces."""
    return cluster.on(start, "ping", "-M", "do", "-s", "1472", "-c", "1", address)


def _speed(cluster: ClusterFacts, links: Links) -> Iterator[Finding]:
    for (start, end), flow in links.flows.items():
        if "error" in flow:
            address = links.chosen[end].address
            yield Finding(
                "bulk-stalls", "error", (start, end),
                f"{start} connects to {end}, but a stream of data stops: {flow['text']}",
                "short messages pass, gradients hang: most often packets larger than the network takes are dropped",
                f"{_ping(cluster, start, address)} shows the size that passes; lower the MTU to it",
            )  # fmt: skip
    rates = links.rates()
    for start, end in links.slow():
        rate, usual = rates[start, end], statistics.median(rates.values())
        others = f"; the median of the others is {usual / GIGABIT:.2f} Gbit/s" if len(rates) > 2 else ""
        yield Finding(
            "slow-link", "warning", (start, end), f"{start} to {end}: {rate / GIGABIT:.3f} Gbit/s{others}",
            f"100 MB of gradients (ResNet-50) take at least {2 * 1e8 / rate:.1f} s in every step, on all hosts",
            f"{cluster.on(start, 'ethtool', links.chosen[start].interface)} shows the link's speed and duplex; cables,"
            " a shared or throttled port, or the wrong network: --network",
        )  # fmt: skip


def folder(cluster: ClusterFacts, found: RunFolder) -> Iterator[Finding]:
    """The run directory can be written to, and is the same on every host."""
    first = next(iter(cluster.facts), None)  # none answers: nothing was written
    for host, reply in found.written.items():
        if "error" not in reply:
            continue
        severity: Severity = "error" if host == first else "warning"
        who = "rank 0 writes checkpoints and the run's record there" if host == first else "programs may write there"
        if reply.get("errno") in ("ENOSPC", "EDQUOT"):
            room = known(cluster.facts[host], "run_dir") or {}
            if room.get("free_bytes", FULL_BYTES) < FULL_BYTES:
                continue  # told with its figures
            yield Finding(
                "full-disk", severity, (host,), f"the run directory {found.path} takes no more: {reply['error']}", who,
                f"remove what is not needed: {cluster.on(host, 'df', '-h', found.path)}",
            )  # fmt: skip
            continue
        yield Finding(
            "run-dir-not-writable", severity, (host,), f"{found.path} cannot be written: {reply['error']}", who,
            f"{cluster.on(host, 'ls', '-ld', found.path)} shows its owner; mounted read-only?"
            f" {cluster.on(host, 'mount', '-o', 'remount,rw', found.path)}; or name another: --run-dir DIR",
        )  # fmt: skip
    wrote = [host for host, reply in found.written.items() if "error" not in reply]
    alone = [host for host in wrote if host != first and first in wrote and host not in found.seen.get(first, [])]
    blind = [host for host, seen in found.seen.items() if first in wrote and first not in seen]
    if apart := [host for host in cluster.facts if host in alone or host in blind]:
        yield Finding(
            "run-dir-not-shared", "warning" if found.asked else "note", tuple(apart),
            f"{found.path} is not the same folder as on {first}",
            f"checkpoints and records are on {first} only: a job that resumes on another host does not find them",
            f"put it on a file system that all hosts mount (NFS): --run-dir DIR; or always start on {first} first",
        )  # fmt: skip
