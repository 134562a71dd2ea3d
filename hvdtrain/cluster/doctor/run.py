"""Asks every host at once, over ssh, without installing anything there, and gathers what there is to say.

A probe goes through the session and ends with it. What is measured between hosts is measured by the hosts themselves,
on ports that are open only meanwhile, on the addresses that ranks would use.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.cluster.doctor import examine, findings, live, machine, network, software
from hvdtrain.cluster.doctor.checks import Known
from hvdtrain.cluster.doctor.examine import Question
from hvdtrain.cluster.doctor.findings import Finding
from hvdtrain.cluster.doctor.network import Folder, Links
from hvdtrain.cluster.doctor.sessions import Sessions
from hvdtrain.cluster.hosts import Host
from hvdtrain.cluster.launch.job import working_directory
from hvdtrain.cluster.ssh import Ssh
from hvdtrain.core import stats

TIMEOUT_S = 6.0


FAST_TIMEOUT_S = 6.0


def ssh_for(port: int | None, identity: str | None, timeout_s: float) -> Ssh:
    """ssh gives up before we do, so that it is ssh that says why."""
    return Ssh(port, identity, connect_timeout_s=max(1.0, timeout_s / 2))


def python_paths() -> list[str]:
    """What ranks get as PYTHONPATH: `hvdtrain launch` passes this machine's on."""
    return [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


@dataclass
class Examined:
    """All that was found.

    Attributes:
        question: that was asked.
        cluster: what the hosts that answered said.
        links, folder, live: what was measured; None: not asked, or not possible.
        findings: the worst first.
        seconds: that it took.
    """

    question: Question
    cluster: Known
    links: Links | None = None
    folder: Folder | None = None
    live: live.Live | None = None
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        links = self.links
        return {
            "format": 1, "command": "doctor", "on": socket.gethostname(), "machine": stats.machine(),
            "hosts": {host: dict(facts) for host, facts in self.cluster.facts.items()},
            "ranks": self.question.taking_part,
            "network": links and {
                "chosen": {host: vars(chosen) for host, chosen in links.chosen.items()},
                "reach": links.reach,
                "flows": [{"from": one, "to": other, **flow} for (one, other), flow in links.flows.items()],
                "clocks": {host: {"ahead_s": at, "plus_minus_s": by} for host, (at, by) in links.clocks.items()},
            },
            "run_dir": self.folder and vars(self.folder),
            "live": self.live and vars(self.live),
            "findings": findings.as_json(self.findings),
            "exit_code": findings.exit_code(self.findings),
            "seconds": round(self.seconds, 3),
            "seconds_by_part": {part: round(seconds, 3) for part, seconds in self.spent.items()},
        }  # fmt: skip


def examined(question: Question, *, fast: bool = False, with_live: bool = True) -> Examined:
    """Return all that can be found out about the hosts.

    Args:
        question: what to examine.
        fast: only what must hold before a job starts.
        with_live: whether to run a real all-reduce where nothing speaks against it.
    """
    started = time.monotonic()
    with contextlib.closing(Sessions()) as talk:
        cluster = examine.facts(talk, question, fast=fast)
        found = Examined(question, cluster)
        found.spent["facts"] = time.monotonic() - started
        everything = [*_quick(found.cluster)]
        if not fast:
            everything += _thorough(talk, found)
        everything += [findings.of_ssh(host, problem) for host, problem in talk.lost.items()]
        everything += _noise(talk)
    found.findings = findings.worst_first(everything)
    if with_live and not fast and cluster.facts and findings.exit_code(found.findings) < 2:
        before = time.monotonic()
        found.live = live.all_reduce(question, cluster)
        found.spent["live"] = time.monotonic() - before
        found.findings = findings.worst_first([*found.findings, *live.checked(found.live)])
    found.seconds = time.monotonic() - started
    return found


def fast(
    hosts: Sequence[Host], *, np: int | None = None, ssh: Ssh | None = None, python: str = sys.executable,
    cwd: str | None = None, timeout_s: float = FAST_TIMEOUT_S,
) -> list[Finding]:  # fmt: skip
    """Return what would keep a job from starting, or make it wrong, as far as a second or two can tell.

    Args:
        hosts: in the job's order.
        np: how many ranks; None: one for every slot.
        ssh: how hosts are reached.
        python: the interpreter on other hosts.
        cwd: the folder that ranks start in; None: this process's.
        timeout_s: that a host may take to answer.
    """
    question = Question(
        hosts=hosts, np=np, python=python, ssh=ssh or ssh_for(None, None, timeout_s), timeout_s=timeout_s,
        cwd=cwd or working_directory(), paths=python_paths(),
    )  # fmt: skip
    return examined(question, fast=True).findings


def _quick(cluster: Known) -> list[Finding]:
    return [*network.distinct(cluster), *software.quick(cluster), *machine.quick(cluster)]


def _thorough(talk: Sessions, found: Examined) -> list[Finding]:
    """What takes measurements; a host that stops answering meanwhile is left out of the rest."""
    cluster, before = found.cluster, time.monotonic()
    everything = [*machine.thorough(cluster)]
    if cluster.facts:
        found.links = examine.links(talk, found.question, cluster)
        everything += network.network(cluster, found.links)
    found.spent["network"] = time.monotonic() - before
    before = time.monotonic()
    found.folder = examine.folder(talk, found.question, cluster)
    everything += network.folder(cluster, found.folder)
    found.spent["run_dir"] = time.monotonic() - before
    return everything


def _noise(talk: Sessions) -> list[Finding]:
    """Hosts whose shell prints something of its own."""
    return [
        Finding(
            "noisy-shell",
            "note",
            (host,),
            f"its shell prints before a command does: {session.noise.strip().splitlines()[0][:80]!r}",
            "copying by scp and rsync fails, and logs start with it",
            "have ~/.bashrc print only in interactive shells: [[ $- == *i* ]] || return",
        )  # fmt: skip
        for host, session in talk.alive.items()
        if session.noise.strip()
    ]
