"""How Slurm writes lists: tasks per node, node names; and the port that the ranks of one step can all work out."""

from __future__ import annotations

import re
import zlib

from hvdtrain.errors import LauncherError

# below Linux's ephemeral ports (32768 and up), above the services everyone knows
_FIRST_PORT, _PORTS = 15000, 16000


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's "2(x3),1" to [2, 2, 2, 1]; pure.

    Raises:
        LauncherError: not in Slurm's form.
    """
    counts: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", piece)
        if match is None:
            raise LauncherError('Slurm writes tasks per node as "2(x3),1"', repr(text))
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first name in a Slurm node list: "gpu[03-04,07],login" gives "gpu03"; pure.

    Raises:
        LauncherError: not in Slurm's form.
    """
    match = re.match(r"(?:[\w.-]|\[[\d,\s-]+\])+(?=,|$)", nodes.strip())
    if match is None:
        raise LauncherError('Slurm writes nodes as "gpu[03-04,07],login"', repr(nodes))
    # leading zeros belong to the name; lists of several dimensions ("rack[0-1]node[2-3]") start with the first of each
    return re.sub(r"\[\s*(\d+)[^]]*\]", r"\1", match[0])


def port_of(*names: str) -> int:
    """Return the port for the ranks of one job: a hash of what only that job has; the same on every rank."""
    return _FIRST_PORT + zlib.crc32(".".join(names).encode()) % _PORTS
