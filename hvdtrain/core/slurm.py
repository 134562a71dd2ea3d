"""How Slurm writes lists: tasks per node, node names, hosts of a job; and the port that a step's ranks can work out."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Mapping

from hvdtrain.core.errors import LauncherError

# below Linux's ephemeral ports (32768 and up), above the services everyone knows
_FIRST_PORT, _PORTS = 15000, 16000


def tasks_per_node(text: str) -> list[int]:
    """Expands Slurm's "2(x3),1" to [2, 2, 2, 1]; pure. Raises `LauncherError` for any other form."""
    counts: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", piece)
        if match is None:
            raise LauncherError('SLURM_TASKS_PER_NODE must be written as "2(x3),1"', repr(text))
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand(nodes: str) -> list[str]:
    """Returns all names of a Slurm node list, in order: "gpu[03-04,07],login" gives gpu03, gpu04, gpu07, login;
    pure. Raises `LauncherError` for any other form."""
    if not re.fullmatch(rf"{_NODE}(?:,{_NODE})*", nodes):
        raise LauncherError('SLURM_JOB_NODELIST must be written as "gpu[03-04,07],login"', repr(nodes))
    names: list[str] = []
    for pattern in re.findall(_NODE, nodes):
        parts = [_range(part) if part.startswith("[") else [part] for part in re.findall(r"\[[^]]*\]|[^[]+", pattern)]
        names += ["".join(chosen) for chosen in itertools.product(*parts)]
    return names


_NODE = r"(?:[\w.-]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"


def _range(text: str) -> list[str]:
    """Expands "[03-04,07]" to 03, 04, 07: leading zeros belong to the name."""
    numbers: list[str] = []
    for piece in text[1:-1].split(","):
        first, _, last = piece.partition("-")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers


def job_hosts(environ: Mapping[str, str]) -> str | None:
    """Returns the hosts of the Slurm job this process is in, as "host1:2,host2:2" (tasks on each); None outside of
    one. Raises `LauncherError` if the job's variables are missing, not in Slurm's form, or contradict each other."""
    if not environ.get("SLURM_JOB_ID"):
        return None
    nodes, tasks = environ.get("SLURM_JOB_NODELIST", ""), environ.get("SLURM_TASKS_PER_NODE", "")
    names, counts = expand(nodes), tasks_per_node(tasks)
    if len(names) != len(counts):
        received = f"SLURM_JOB_NODELIST={nodes!r}, SLURM_TASKS_PER_NODE={tasks!r}"
        raise LauncherError(
            "Slurm must give the tasks of every node of the job", received, "name the hosts: -H h1:2,h2:2"
        )
    return ",".join(f"{name}:{count}" for name, count in zip(names, counts, strict=True))


def port_of(*names: str) -> int:
    """Returns the port for the ranks of one job: a hash of what only that job has; the same on every rank."""
    return _FIRST_PORT + zlib.crc32(".".join(names).encode()) % _PORTS
