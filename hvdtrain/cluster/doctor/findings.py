"""The checks' input (facts of a cluster) and output (findings: the fact, why it matters, the command that fixes it).

All checks are pure functions from the hosts' facts to findings.
"""

from __future__ import annotations

import dataclasses
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.cluster.hosts.ssh import Kind, SshProblem

Facts = Mapping[str, Any]
MIB, GIB = 1 << 20, 1 << 30
FULL_BYTES = 64 * MIB  # a disk with less room than that is full: a checkpoint does not fit
Severity = Literal["error", "warning", "note"]
# an error keeps training from starting, or makes it wrong; a warning makes it slow, or will break it soon
EXIT_CODES: dict[Severity, int] = {"error": 2, "warning": 1, "note": 0}
WIDTH = 116
_LABEL_WIDTH = 8


@dataclass(frozen=True)
class ClusterFacts:
    """The known facts of a cluster.

    Attributes:
        facts: the facts that the probe reported on each host that answered (`probe.facts`), in the user's order; with
            "local": True for the machine that this runs on.
    """

    facts: Mapping[str, Facts]
    ranks: Mapping[str, int]  # how many ranks each host is to run
    python: str  # the interpreter that ranks are started with on other hosts

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return sum(self.ranks.values())

    def of(self, fact: str) -> dict[str, Any]:
        """Returns a fact of every host whose probe reported it, by host."""
        return {name: facts[fact] for name, facts in self.facts.items() if known(facts, fact) is not None}

    def is_local(self, host: str) -> bool:
        """Returns True if a host is the machine that this runs on."""
        return bool(self.facts.get(host, {}).get("local"))

    def on(self, host: str, *command: str) -> str:
        """Returns a command line that runs a command on a host."""
        line = shlex.join(command)
        return line if self.is_local(host) else shlex.join(["ssh", host, line])

    def python_on(self, host: str) -> str:
        """Returns the interpreter that a host's ranks run in."""
        return (known(self.facts[host], "python") or {}).get("executable", self.python)

    def build_on(self, host: str, *flags: str) -> str:
        """Returns a command line that builds Horovod on a host."""
        return self.on(host, self.python_on(host), "-m", "hvdtrain", "build-horovod", "--install", *flags)


def known(facts: Facts, fact: str) -> Any:
    """Returns a fact; None if the host's probe could not report it."""
    value = facts.get(fact)
    return None if isinstance(value, dict) and "unanswered" in value else value


def odd_ones(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the value that most hosts have (of the first host, in a tie), and the hosts that differ with theirs."""
    if not values:
        return None, {}
    counts = Counter(map(str, values.values()))
    usual = max(values.values(), key=lambda value: counts[str(value)])  # max keeps the first of equals
    return usual, {host: value for host, value in values.items() if str(value) != str(usual)}


def bytes_text(count: float) -> str:
    """Returns a number of bytes in words: "64 MiB"."""
    for unit, name in ((1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} bytes"


def listed(values: Mapping[str, Any]) -> str:
    """Returns "host1 a, host2 b"."""
    return ", ".join(f"{host} {value}" for host, value in values.items())


@dataclass(frozen=True)
class Finding:
    """A fault of the cluster, or a fact worth knowing."""

    id: str  # for programs: stable, words joined by "-"
    severity: Severity
    hosts: tuple[str, ...]  # as the user named them; empty: this machine, or all of them
    what: str  # the fact, with its numbers
    why: str  # its consequence
    fix: str  # what to type or change


def exit_code(findings: Iterable[Finding]) -> int:
    """Returns the exit code of the worst finding: 2 for an error, 1 for a warning, 0 for notes or no findings."""
    return max((EXIT_CODES[finding.severity] for finding in findings), default=0)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings, errors first, without repetitions; the order among equals stays."""
    return sorted(dict.fromkeys(findings), key=lambda finding: -EXIT_CODES[finding.severity])


def as_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Returns the findings as plain data."""
    return [dataclasses.asdict(finding) | {"hosts": list(finding.hosts)} for finding in findings]


def text(findings: Sequence[Finding]) -> str:
    """Returns the findings for people."""
    blocks = []
    for finding in findings:
        head = f"{finding.severity.upper():<{_LABEL_WIDTH}} {finding.id}"
        lines = [f"{head}: {', '.join(finding.hosts)}" if finding.hosts else head]
        for label in ("what", "why", "fix"):
            lines += _wrapped(f"  {label}:", getattr(finding, label))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _wrapped(label: str, words: str) -> list[str]:
    """Lines of the text behind its label. What is to be typed stays whole: only spaces between words break."""
    lines = []
    for number, paragraph in enumerate(words.splitlines() or [""]):
        first = f"{label:<{_LABEL_WIDTH}} " if number == 0 else " " * (_LABEL_WIDTH + 1)
        lines += textwrap.wrap(
            paragraph, WIDTH, initial_indent=first, subsequent_indent=" " * (_LABEL_WIDTH + 1),
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return lines


_WHY_SSH: dict[Kind, str] = {
    "unreachable": "no rank can be started there, and the others would wait for its ranks for ever",
    "refused": "ranks on other hosts are started by ssh",
    "unknown_name": "the launcher cannot find the host",
    "unknown_host_key": "another machine could answer at that address, so ssh refuses to connect",
    "changed_host_key": "the machine that answers is not the one that was trusted",
    "denied": "the launcher cannot answer questions: it needs a key that works without a password",
    "timeout": "a job would hang at its start, waiting for this host",
    "start_up_files": "every command that ssh runs there runs the shell's start-up files first",
    "no_python": "the ranks run the same interpreter on every host",
    "no_hvdtrain": "every host's ranks are started by hvdtrain's agent there",
    "no_ssh": "ranks on other hosts are started by ssh",
    "other": "no rank can be started there",
}


def of_ssh(host: str, problem: SshProblem) -> Finding:
    """Returns the finding for a host that could not be reached."""
    name = problem.kind.replace("_", "-")
    name = name if name.startswith("no-") else f"ssh-{name}"
    return Finding(name, "error", (host,), problem.what, _WHY_SSH[problem.kind], problem.fix)
