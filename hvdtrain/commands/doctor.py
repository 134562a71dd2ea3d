"""`hvdtrain doctor`: what is wrong with this machine or cluster, why it matters, and the command that fixes it.

Asks every host at once, over ssh, without installing anything there: a probe goes through the session and ends with
it. The hosts themselves measure the links between them, on the addresses that ranks would use, on ports that are open
only during the measurement.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from hvdtrain.cluster.doctor import findings
from hvdtrain.cluster.doctor.examine import DoctorReport, examined
from hvdtrain.cluster.doctor.findings import GIB, Facts, bytes_text, known
from hvdtrain.cluster.doctor.network import GIGABIT, Links
from hvdtrain.cluster.hosts import probe
from hvdtrain.cluster.hosts.ssh import Ssh
from hvdtrain.cluster.launch.job import Timeouts
from hvdtrain.commands import host_flags
from hvdtrain.core import flags
from hvdtrain.record import stats

EPILOG = """\
examples:
  hvdtrain doctor                                  this machine
  hvdtrain doctor -H host1:4,host2:4               these hosts, before hvdtrain launch -np 8 -H host1:4,host2:4
  hvdtrain doctor -H host1:4,host2:4 --run-dir /nfs/runs/resnet --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain doctor`."""
    parser.description, parser.epilog = __doc__, EPILOG
    add = parser.add_argument
    # fmt: off
    host_flags.add(parser, "hosts", "hostfile", "np")
    add("--run-dir", type=Path, metavar="DIR",
        help="folder of the runs, which all hosts must share (default: runs, which need not be shared)")
    host_flags.add(parser, "network")
    add("--fast", action="store_true", help="run only the checks that hvdtrain launch makes before a job")
    add("--timeout", type=flags.seconds, default=6.0, metavar="S",
        help="seconds for a host to answer (default: %(default)g)")
    host_flags.add(parser, "python", "ssh_port", "identity")
    add("--json", action="store_true", help="print everything as JSON")
    # fmt: on


def run(args: argparse.Namespace) -> int:
    """Examines and prints; returns the exit code."""
    job = host_flags.job_of(
        args, os.environ, here=lambda: max(1, probe.gpu_count()), timeouts=Timeouts(start_s=args.timeout),
        # ssh gives up before we do, so that it is ssh that says why
        ssh=Ssh(args.ssh_port, args.identity, connect_timeout_s=max(1.0, args.timeout / 2)),
    )  # fmt: skip
    found = examined(job, args.run_dir, fast=args.fast)
    print(json.dumps(found.as_json(), indent=1) if args.json else text(found))
    return findings.exit_code(found.findings)


def text(found: DoctorReport) -> str:
    """Returns the report as people read it."""
    parts = [_hosts(found)] if found.cluster.facts else []
    if found.links is not None and (measured := _network(found.links)):
        parts.append("\n".join(measured))
    if found.findings:
        parts.append(findings.text(found.findings))
    parts.append(_verdict(found))
    return "\n\n".join(parts)


def _hosts(found: DoctorReport) -> str:
    """Returns the table of the hosts, a column each; of many hosts, a line each."""
    rows = [["", *found.cluster.facts]]
    columns = [_column(found, host) for host in found.cluster.facts]
    rows += [[name, *(column.get(name, "") for column in columns)] for name in columns[0]]
    rows = [row for row in rows if any(row[1:])]
    return stats.table(rows if len(columns) <= 6 else [list(line) for line in zip(*rows, strict=True)])


def _column(found: DoctorReport, host: str) -> dict[str, str]:
    facts = found.cluster.facts[host]
    packages: Facts = known(facts, "packages") or {}
    several = found.links is not None and len(found.links.chosen) > 1
    chosen = found.links.chosen.get(host) if found.links is not None and several else None
    memory, shared = known(facts, "memory") or {}, known(facts, "shared_memory")
    return {
        "ranks": str(found.cluster.ranks[host]),
        "address": f"{chosen.address} {chosen.interface}" if chosen else "",
        "Python": (known(facts, "python") or {}).get("version", "?"),
        "torch": packages.get("torch", "-"),
        "tensorflow": packages.get("tensorflow", packages.get("tensorflow-cpu", "-")),
        "Keras": packages.get("keras", "-"),
        "Horovod": packages.get("horovod", "-"),
        "  for torch": _built(facts, "torch"),
        "  for tensorflow": _built(facts, "tensorflow"),
        "GPUs": _gpus(facts),
        "NCCL": next((packages[name] for name in packages if name.startswith("nvidia-nccl")), "-"),
        "cores": _cores(facts),
        "memory free": f"{memory['MemAvailable'] / GIB:.0f} GiB" if "MemAvailable" in memory else "",
        "/dev/shm free": bytes_text(shared["free_bytes"]) if shared else "",
    }


def _built(facts: Facts, framework: str) -> str:
    extension: Any = ((known(facts, "horovod") or {}).get("extensions") or {}).get(framework)
    if extension is None:
        return "-"
    names = {"nccl": "NCCL", "mpi": "MPI", "gloo": "Gloo"}
    return " ".join(name for key, name in names.items() if extension[key])


def _gpus(facts: Facts) -> str:
    gpus = known(facts, "gpus")
    if not gpus or not gpus["devices"]:
        return str(known(facts, "gpu_count") or "-")
    kinds = Counter(device["name"].removeprefix("NVIDIA ") for device in gpus["devices"])
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) + f" (driver {gpus['driver']})"


def _cores(facts: Facts) -> str:
    cores = known(facts, "cores")
    if cores is None:
        return "?"
    return f"{cores['quota']:g} of {cores['usable']}" if cores["quota"] else str(cores["usable"])


def _network(links: Links) -> list[str]:
    lines = []
    pairs = [reply for _, _, reply in links.replies()]
    if answers := [reply["seconds"] for reply in pairs if "seconds" in reply]:
        lines.append(
            f"network: {len(answers)} of {len(pairs)} ways between hosts open; a byte there and back in"
            f" {min(answers) * 1e3:.2f} to {max(answers) * 1e3:.2f} ms"
        )
    if rates := sorted(links.rates().values()):
        lines.append(
            f"network: {rates[0] / GIGABIT:.2f} to {rates[-1] / GIGABIT:.2f} Gbit/s, one TCP stream from a host to"
            " the next"
        )
    return lines


def _verdict(found: DoctorReport) -> str:
    hosts, ranks = len(found.job.ranks), found.job.np
    what = f"{hosts} host(s), {ranks} rank(s), examined in {found.seconds:.1f} s"
    if not found.findings:
        return f"nothing found: {what}"
    counts = Counter(finding.severity for finding in found.findings)
    return ", ".join(f"{counts[name]} {name}(s)" for name in findings.EXIT_CODES if counts[name]) + f": {what}"
