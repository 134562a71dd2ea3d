"""What the checks work on, and words they share. All checks are pure: what hosts said in, findings out."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Facts = Mapping[str, Any]
MIB, GIB = 1 << 20, 1 << 30
FULL_BYTES = 64 * MIB  # a disk with less room than that is full: a checkpoint does not fit


@dataclass(frozen=True)
class ClusterFacts:
    """What is known of a cluster.

    Attributes:
        facts: what each host that answered said about itself (`probe.facts`), in the user's order; with "local": True
            for the machine that this runs on.
        ranks: how many ranks each host is to run.
        python: the interpreter that ranks are started with on other hosts.
    """

    facts: Mapping[str, Facts]
    ranks: Mapping[str, int]
    python: str

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return sum(self.ranks.values())

    def of(self, fact: str) -> dict[str, Any]:
        """Return a fact of every host that could tell it."""
        return {name: facts[fact] for name, facts in self.facts.items() if known(facts, fact) is not None}

    def is_local(self, host: str) -> bool:
        """Return whether a host is the machine that this runs on."""
        return bool(self.facts.get(host, {}).get("local"))

    def on(self, host: str, *command: str) -> str:
        """Return a command line that runs a command on a host."""
        line = shlex.join(command)
        return line if self.is_local(host) else shlex.join(["ssh", host, line])

    def all_on(self, hosts: Sequence[str], *command: str) -> str:
        """Return command lines that run a command on each of some hosts, three of them at most."""
        lines = [self.on(host, *command) for host in hosts[:3]]
        more = f"\nand so on {', '.join(hosts[3:])}" if len(hosts) > 3 else ""
        return "\n".join(lines) + more


def known(facts: Facts, fact: str) -> Any:
    """Return a fact; None where the host could not tell it."""
    value = facts.get(fact)
    return None if isinstance(value, dict) and "unanswered" in value else value


def odd_ones(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the value that most hosts have (of the first host, in a tie), and the hosts that differ with theirs."""
    if not values:
        return None, {}
    counts = Counter(map(str, values.values()))
    usual = max(values.values(), key=lambda value: counts[str(value)])  # max keeps the first of equals
    return usual, {host: value for host, value in values.items() if str(value) != str(usual)}


def bytes_text(count: float) -> str:
    """Return a number of bytes in words: "64 MiB"."""
    for unit, name in ((1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} bytes"


def listed(values: Mapping[str, Any]) -> str:
    """Return "host1 a, host2 b"."""
    return ", ".join(f"{host} {value}" for host, value in values.items())
