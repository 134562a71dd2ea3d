"""Finds hosts that do not reach each other through the ranks' network, though the launcher reaches both.

The first host is watched all the time (`data_path`). The others are asked when ranks have lost one another and no rank
is to blame: each opens a port at its address for a while, and connects to those of the others.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from hvdtrain.cluster.hosts.data_path import LOOK_S
from hvdtrain.cluster.hosts.protocol import Message
from hvdtrain.cluster.launch.agents import Connection

Pair = tuple[str, str]
_ANSWER_S = 3.0  # for an agent's answer, beyond what it waits for
_SERIALS = itertools.count(1)


class LinkCheck:
    """A check of the links between some hosts, by their agents (`addresses`: the hosts' in the ranks' network)."""

    def __init__(self, asked: Mapping[str, Connection], addresses: Mapping[str, str]) -> None:
        self.serial = next(_SERIALS)
        self._asked, self._addresses = asked, addresses
        self._peers: dict[str, list[object]] = {}
        self._missing: dict[str, list[str]] | None = None  # None: the ports are not known yet
        self._until_s = time.monotonic() + _ANSWER_S
        for name, its in asked.items():
            its.send("listen", serial=self.serial, own=addresses[name])

    def take(self, host: str, message: Message) -> None:
        """Takes in an agent's answer."""
        if message["type"] == "listens":
            self._peers[host] = [self._addresses[host], message["port"]]
        elif self._missing is not None:
            self._missing[host] = message["missing"]

    def pairs(self) -> list[Pair] | None:
        """Returns the hosts that do not reach each other; None while answers may still come. Call it often."""
        answers = self._peers if self._missing is None else self._missing
        due = [name for name, its in self._asked.items() if name not in answers and not (its.ended or its.closed)]
        if due and time.monotonic() < self._until_s:
            return None
        if self._missing is None:
            self._missing, self._until_s = {}, time.monotonic() + LOOK_S + _ANSWER_S
            for name in self._peers:
                others = {other: peer for other, peer in self._peers.items() if other != name}
                self._asked[name].send("reach", serial=self.serial, peers=others)
            return None
        order = list(self._asked)
        found = {(host, other) for host, missing in self._missing.items() for other in missing}
        return sorted({(min(pair, key=order.index), max(pair, key=order.index)) for pair in found})

    def in_words(self, pairs: Sequence[Pair]) -> str:
        """Returns what is wrong with the pairs."""
        some = [" and ".join(f"{host} ({self._addresses[host]})" for host in pair) for pair in pairs[:3]]
        more = f", and {len(pairs) - 3} more pairs" if len(pairs) > 3 else ""
        what = f"{'; '.join(some)}{more} cannot reach each other through the ranks' network, though ssh reaches them"
        return f"{what}: the link between them, or a firewall, may be the reason"


def to_drop(pairs: Sequence[Pair], ranks: Mapping[str, int]) -> list[str]:
    """Returns hosts without which all others reach each other; pure.

    First the host that most pairs have in common; of equals, the one with the fewest ranks, and the last of these.
    Pairs with a host that has no ranks do not count. `ranks`: by host, in the job's order.
    """
    left, dropped, order = [pair for pair in pairs if set(pair) <= set(ranks)], list[str](), list(ranks)
    while left:
        counts = Counter(host for pair in left for host in pair)
        dropped.append(max(counts, key=lambda host: (counts[host], -ranks[host], order.index(host))))
        left = [pair for pair in left if dropped[-1] not in pair]
    return dropped
