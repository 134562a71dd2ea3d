"""The flags of launch, doctor and verify that select the hosts and configure ssh."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.cluster.hosts.hosts import Host, asked_for
from hvdtrain.cluster.hosts.ssh import Ssh
from hvdtrain.cluster.launch.job import Job
from hvdtrain.core import flags

_FLAGS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "np": (("-np", "--np"), {"type": flags.whole(1), "metavar": "N", "help": "number of ranks (default: one a slot)"}),
    "hosts": (("-H", "--hosts"), {"metavar": "LIST", "help": "hosts with their slots: host1:4,host2:4 (default:"
              " those of the Slurm job around this, else this machine)"}),
    "hostfile": (("-hostfile", "--hostfile"), {"type": Path, "metavar": "FILE", "help": "file with a line for each"
                 " host: host1 slots=4"}),
    "network": (("--network",), {"metavar": "NET", "help": "network for the ranks: 10.0.0.0/24, or an address in it"
                " (default: chosen)"}),
    "python": (("--python",), {"default": sys.executable, "metavar": "PATH", "help": "Python interpreter with hvdtrain"
               " on the hosts (default: this one)"}),
    "ssh_port": (("--ssh-port",), {"type": flags.whole(1), "metavar": "N", "help": "port of sshd on the hosts (default:"
                 " as ssh is configured)"}),
    "identity": (("--identity",), {"metavar": "FILE", "help": "private key for ssh (default: as ssh is configured)"}),
}  # fmt: skip


def add(parser: argparse.ArgumentParser, *names: str, **helps: str) -> None:
    """Adds some of the flags, in this order; `helps`: those whose help is another one in a command."""
    for name in (*names, *helps):
        words, settings = _FLAGS[name]
        parser.add_argument(*words, **settings | ({"help": helps[name]} if name in helps else {}))


def job_of(
    args: argparse.Namespace,
    environ: Mapping[str, str],
    argv: Sequence[str] = (),
    *,
    here: Callable[[], int],
    **more: Any,
) -> Job:
    """Returns the job that the flags, and the Slurm job in `environ`, ask for; raises ConfigError for bad hosts.

    Without hosts and `-np` it is on this machine, with as many ranks as `here()` returns. `more`: fields of the job.
    """
    hosts = asked_for(args.hosts, args.hostfile, environ) or [Host("localhost", args.np or here())]
    np = args.np or sum(host.slots for host in hosts)
    fields = {"ssh": Ssh(args.ssh_port, args.identity), "python": args.python, "network": args.network} | more
    return Job(argv, hosts, np, **fields)
