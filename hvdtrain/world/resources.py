"""A rank's resources on its host: cores, shared fairly with the other ranks there, and memory that the process keeps
instead of returning it after every step."""

from __future__ import annotations

import ctypes
import math
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.world.world import World

MOST_WORKERS = 16  # a rank's; more gain nothing and cost memory each


@dataclass(frozen=True)
class Allowance:
    """The cores and processor time that a process may use."""

    host: str
    cores: frozenset[int]  # its affinity
    quota: float  # processor seconds a second of its control group; infinite without a limit


def own_allowance() -> Allowance:
    """Returns the cores and processor time that the kernel allows this process."""
    return Allowance(socket.gethostname(), frozenset(os.sched_getaffinity(0)), cgroup_quota())


def cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Returns the control group's limit in cores (`cpu.max` of version 2, `cpu.cfs_*` of 1); infinite without one.

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
    """Returns how many cores `rank` has for itself, of every rank's allowance in rank order; pure.

    A core that several ranks of a host may use counts for each of them as a part; a quota is shared by its ranks.
    """
    mine = ranks[rank]
    neighbours = [other for other in ranks if other.host == mine.host]
    users = Counter(core for other in neighbours for core in other.cores)
    return min(sum(1 / users[core] for core in mine.cores), mine.quota / len(neighbours))


def usable_cores(world: World) -> float:
    """Returns how many cores this rank has for itself and its workers; collective."""
    ranks = world.gather(own_allowance())
    return share_of(min(world.rank, len(ranks) - 1), ranks)  # a new rank of an elastic job that began with one


def workers_for(cores: float, *, on_gpu: bool) -> int:
    """Returns how many worker processes feed a rank; pure.

    With a GPU one core drives the rank and each other one can decode. Without one the training itself needs the
    cores: a quarter of them for the data, and on a single core none, where processes would only take turns.
    """
    if on_gpu:
        return max(1, min(MOST_WORKERS, int(cores) - 1))
    return min(MOST_WORKERS, 0 if cores < 2 else max(1, int(cores) // 4))


# of malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_WANTED = (
    (_M_TRIM_THRESHOLD, 2**31 - 1),
    (_M_TOP_PAD, 32 << 20),
    # large blocks as well: each would come straight from the kernel, and go back when it is freed
    (_M_MMAP_MAX, 0),
    # threads get heaps of their own, which end at 64 MiB and are handed back when they are empty; the stages of a
    # pipeline pass tensors on to each other
    (_M_ARENA_MAX, 1),
)
_USERS = (
    "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_ARENA_MAX",
    "GLIBC_TUNABLES",
)  # fmt: skip


def keep_freed_memory() -> bool:
    """Makes glibc's malloc keep freed memory; returns True if it does.

    By default malloc returns the memory of large tensors to the kernel and gets it again, zeroed and page by page, in
    every layer of every step: about 6 % of a step of ResNet-18 in one process (`hvdtrain bench train`), a quarter of
    one of ResNet-50 as a pipeline that takes its batch as a whole, with 35 % more memory. The process keeps its peak
    of memory. Threads that already have a heap keep it: call this early. The user's settings take precedence; other
    allocators (LD_PRELOAD) ignore this.
    (Parameters: mallopt(3).)
    """
    if any(name in os.environ for name in _USERS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    return all([bool(mallopt(option, value)) for option, value in _WANTED])
