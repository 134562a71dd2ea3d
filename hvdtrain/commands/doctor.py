"""``hvdtrain doctor``: what is wrong with this machine or cluster, why it matters, and the command that fixes it.

Asks every host at once, over ssh, without installing anything there: a probe goes through the session and ends with
it. What is measured between hosts is measured by the hosts themselves, on ports that are open only meanwhile, on the
addresses that ranks would use.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from hvdtrain.cluster.doctor import findings, probe
from hvdtrain.cluster.doctor.examine import Question
from hvdtrain.cluster.doctor.run import TIMEOUT_S, examined, python_paths, ssh_for
from hvdtrain.cluster.hosts import Host, asked_for
from hvdtrain.commands import report
from hvdtrain.core import flags

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
    add("-np", "--np", type=flags.whole(1), metavar="N", help="ranks of the job (default: one a slot)")
    add("--run-dir", type=Path, metavar="DIR", help="that runs are written to, and that hosts share (default: runs,"
        " which they need not)")
    add("--network", metavar="NET", help="that ranks shall use: 10.0.0.0/24, or an address in it (default: chosen)")
    add("--fast", action="store_true", help="only what hvdtrain launch checks before it starts a job")
    add("--no-live", action="store_true", help="no all-reduce, which imports a framework on every host")
    add("--timeout", type=flags.positive, default=TIMEOUT_S, metavar="S",
        help="that a host may take to answer (default: %(default)g)")
    add("--python", default=sys.executable, metavar="PATH", help="the interpreter on the hosts (default: this one)")
    add("--ssh-port", type=flags.whole(1), metavar="N", help="of the hosts' sshd (default: as ssh is configured)")
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
        timeout_s=args.timeout, ssh=ssh_for(args.ssh_port, args.identity, args.timeout), paths=python_paths(),
    )  # fmt: skip
