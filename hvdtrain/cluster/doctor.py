"""``hvdtrain doctor``: what is wrong with this machine or cluster, why it matters, and the command that fixes it.

Asks every host at once, over ssh, without installing anything there: a probe goes through the session and ends with
it. What is measured between hosts is measured by the hosts themselves, on ports that are open only meanwhile, on the
addresses that ranks would use.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain import startup, stats
from hvdtrain.cluster import checks_machine, checks_network, checks_software, examine, findings, live, probe, report
from hvdtrain.cluster.checks import Known
from hvdtrain.cluster.checks_network import Folder, Links
from hvdtrain.cluster.examine import Question
from hvdtrain.cluster.findings import Finding
from hvdtrain.cluster.hosts import Host, asked_for
from hvdtrain.cluster.job import working_directory
from hvdtrain.cluster.session import Sessions, sessions
from hvdtrain.cluster.ssh import Ssh

TIMEOUT_S = 6.0
FAST_TIMEOUT_S = 6.0
EPILOG = """\
examples:
  hvdtrain doctor                                  this machine
  hvdtrain doctor -H host1:4,host2:4               these hosts, before hvdtrain launch -np 8 -H host1:4,host2:4
  hvdtrain doctor -H host1:4,host2:4 --run-dir /nfs/runs/resnet --json

exit code: 0 nothing to say, or notes; 1 warnings; 2 errors: a job would not start, or train wrong
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``hvdtrain doctor``."""
    parser.description, parser.epilog = __doc__, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    # fmt: off
    add("-H", "--hosts", metavar="LIST", help="host1:4,host2:4: names and slots (default: those of the Slurm job"
        " this runs in, else this machine)")
    add("--hostfile", type=Path, metavar="FILE", help="lines like: host1 slots=4")
    add("-np", "--np", type=startup.whole(1), metavar="N", help="ranks of the job (default: one a slot)")
    add("--run-dir", type=Path, metavar="DIR", help="that runs are written to, and that hosts share (default: runs,"
        " which they need not)")
    add("--network", metavar="NET", help="that ranks shall use: 10.0.0.0/24, or an address in it (default: chosen)")
    add("--fast", action="store_true", help="only what hvdtrain launch checks before it starts a job")
    add("--no-live", action="store_true", help="no all-reduce, which imports a framework on every host")
    add("--timeout", type=startup.positive, default=TIMEOUT_S, metavar="S",
        help="that a host may take to answer (default: %(default)g)")
    add("--python", default=sys.executable, metavar="PATH", help="the interpreter on the hosts (default: this one)")
    add("--ssh-port", type=startup.whole(1), metavar="N", help="of the hosts' sshd (default: as ssh is configured)")
    add("--identity", metavar="FILE", help="a private key (default: as ssh is configured)")
    add("--json", action="store_true", help="print everything as JSON")
    # fmt: on


def run(args: argparse.Namespace) -> int:
    """Examines and prints; returns the exit code."""
    found = examined(_question(args), fast=args.fast, with_live=not args.no_live)
    print(json.dumps(found.as_json(), indent=1) if args.json else report.text(found))
    return findings.exit_code(found.findings)


def _question(args: argparse.Namespace) -> Question:
    hosts = asked_for(args.hosts, args.hostfile, os.environ)
    hosts = hosts or [Host("localhost", args.np or max(1, probe.gpu_count()))]
    return Question(
        hosts=hosts, np=args.np, python=args.python, network=args.network, run_dir=args.run_dir,
        timeout_s=args.timeout, ssh=_ssh(args.ssh_port, args.identity, args.timeout), paths=_paths(),
    )  # fmt: skip


def _ssh(port: int | None, identity: str | None, timeout_s: float) -> Ssh:
    """ssh gives up before we do, so that it is ssh that says why."""
    return Ssh(port, identity, connect_timeout_s=max(1.0, timeout_s / 2))


def _paths() -> list[str]:
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
    with sessions() as talk:
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
        hosts=hosts, np=np, python=python, ssh=ssh or _ssh(None, None, timeout_s), timeout_s=timeout_s,
        cwd=cwd or working_directory(), paths=_paths(),
    )  # fmt: skip
    return examined(question, fast=True).findings


def _quick(cluster: Known) -> list[Finding]:
    return [*checks_network.distinct(cluster), *checks_software.quick(cluster), *checks_machine.quick(cluster)]


def _thorough(talk: Sessions, found: Examined) -> list[Finding]:
    """What takes measurements; a host that stops answering meanwhile is left out of the rest."""
    cluster, before = found.cluster, time.monotonic()
    everything = [*checks_machine.thorough(cluster)]
    if cluster.facts:
        found.links = examine.links(talk, found.question, cluster)
        everything += checks_network.network(cluster, found.links)
    found.spent["network"] = time.monotonic() - before
    before = time.monotonic()
    found.folder = examine.folder(talk, found.question, cluster)
    everything += checks_network.folder(cluster, found.folder)
    found.spent["run_dir"] = time.monotonic() - before
    return everything


def _noise(talk: Sessions) -> list[Finding]:
    """Hosts whose shell prints something of its own."""
    return [
        Finding(
            "noisy-shell",
            "note",
            (host,),
            f"its shell prints before a command does: {session.noise[0][:80]!r}",
            "copying by scp and rsync fails, and logs start with it",
            "have ~/.bashrc print only in interactive shells: [[ $- == *i* ]] || return",
        )  # fmt: skip
        for host, session in talk.alive.items()
        if any(session.noise)
    ]
