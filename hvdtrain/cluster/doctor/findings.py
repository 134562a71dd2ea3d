"""What `hvdtrain doctor` finds: each with what was seen, why it matters and the command that fixes it."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.cluster.ssh import Kind, SshProblem

Severity = Literal["error", "warning", "note"]
# an error keeps training from starting, or makes it wrong; a warning makes it slow, or will break it soon
EXIT_CODES: dict[Severity, int] = {"error": 2, "warning": 1, "note": 0}
WIDTH = 116
_LABEL_WIDTH = 8


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    Attributes:
        id: for programs: stable, words joined by "-".
        severity: how bad.
        hosts: that it is about, as the user named them; empty: this machine, or all of them.
        what: was seen, with the numbers.
        why: it matters.
        fix: what to type or change.
    """

    id: str
    severity: Severity
    hosts: tuple[str, ...]
    what: str
    why: str
    fix: str


def exit_code(findings: Iterable[Finding]) -> int:
    """Return what the worst finding says: 2 for an error, 1 for a warning, 0 for notes and nothing."""
    return max((EXIT_CODES[finding.severity] for finding in findings), default=0)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings, errors first, without repetitions; the order among equals stays."""
    return sorted(dict.fromkeys(findings), key=lambda finding: -EXIT_CODES[finding.severity])


def as_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return the findings as plain data."""
    return [dataclasses.asdict(finding) | {"hosts": list(finding.hosts)} for finding in findings]


def text(findings: Sequence[Finding]) -> str:
    """Return the findings as a person reads them."""
    return "\n\n".join(map(_block, findings))


def _block(finding: Finding) -> str:
    head = f"{finding.severity.upper():<{_LABEL_WIDTH}} {finding.id}"
    lines = [f"{head}: {', '.join(finding.hosts)}" if finding.hosts else head]
    for label in ("what", "why", "fix"):
        lines += _wrapped(f"  {label}:", getattr(finding, label))
    return "\n".join(lines)


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
    "unknown_host_key": "whoever answers at that address could be another machine; ssh refuses rather than trust it",
    "changed_host_key": "the machine that answers is not the one that was trusted",
    "denied": "the launcher cannot answer questions: it needs a key that works without a password",
    "timeout": "a job would hang at its start, waiting for this host",
    "no_python": "the ranks run the same interpreter on every host",
    "no_hvdtrain": "every host's ranks are started by hvdtrain's agent there",
    "no_ssh": "ranks on other hosts are started by ssh",
    "other": "no rank can be started there",
}


def of_ssh(host: str, problem: SshProblem) -> Finding:
    """Return the finding for a host that could not be reached."""
    name = problem.kind.replace("_", "-")
    id_ = {"no_python": name, "no_hvdtrain": "no-hvdtrain", "no_ssh": "no-ssh"}.get(problem.kind, f"ssh-{name}")
    return Finding(id_, "error", (host,), problem.what, _WHY_SSH[problem.kind], problem.fix)
