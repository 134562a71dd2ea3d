"""How many cores a rank may keep busy: what its process is allowed, shared fairly with the other ranks of its host."""

from __future__ import annotations

import math
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.world import World

MOST_WORKERS = 16  # a rank's; more gain nothing and cost memory each


@dataclass(frozen=True)
class Allowance:
    """What one process may use.

    Attributes:
        host: its name.
        cores: the cores it may run on (its affinity).
        quota: processor seconds a second that its control group may use; infinite where there is no limit.
    """

    host: str
    cores: frozenset[int]
    quota: float


def own_allowance() -> Allowance:
    """Returns what this process may use, as the kernel says."""
    return Allowance(socket.gethostname(), frozenset(os.sched_getaffinity(0)), cgroup_quota())


def cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Returns the control group's limit in cores (``cpu.max`` of version 2, ``cpu.cfs_*`` of 1); infinite without one.

    A container shows its own group as the root. Affinity knows nothing of it: a container limited to 2 processors on
    a host of 96 has an affinity of 96.
    """
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return math.inf
    if quota in ("max", "-1"):
        return math.inf
    return int(quota) / int(period)


def share_of(rank: int, ranks: Sequence[Allowance]) -> float:
    """Returns how many cores `rank` has for itself; pure.

    A core that several ranks of a host may use counts for each of them as a part. So ranks bound to different cores
    (``mpirun --bind-to core``) keep theirs whole, and ranks that may all run anywhere share alike. A quota is shared
    by the ranks of its host.

    Args:
        rank: whose share.
        ranks: every rank's allowance, in rank order.
    """
    mine = ranks[rank]
    neighbours = [other for other in ranks if other.host == mine.host]
    users = Counter(core for other in neighbours for core in other.cores)
    return min(sum(1 / users[core] for core in mine.cores), mine.quota / len(neighbours))


def usable_cores(world: World) -> float:
    """Returns how many cores this rank has for itself and its workers; collective."""
    return share_of(world.rank, world.gather(own_allowance()))


def workers_for(cores: float, *, on_gpu: bool) -> int:
    """Returns how many worker processes feed a rank; pure.

    With a GPU one core drives the rank and each other one can decode. Without one the training itself needs the
    cores: a quarter of them for the data, and on a single core none, where processes would only take turns.
    """
    if on_gpu:
        return max(1, min(MOST_WORKERS, int(cores) - 1))
    return min(MOST_WORKERS, 0 if cores < 2 else max(1, int(cores) // 4))
