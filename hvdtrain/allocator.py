"""Main memory on a CPU: what a step frees, the next one takes, without asking the kernel again."""

from __future__ import annotations

import ctypes
import os

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
    """Tells glibc's malloc to keep what is freed; returns whether it did.

    By default it hands the memory of large tensors back to the kernel and gets it again, zeroed and page by page, in
    every layer of every step: about 6 % of a step of ResNet-18 in one process (`hvdtrain bench train`), a quarter of
    one of ResNet-50 as a pipeline that takes its batch as a whole, with 35 % more memory. The process keeps its peak
    of memory. Threads that already have a heap keep it: call this early. What the user has set stays, and other
    allocators (LD_PRELOAD) do not listen.
    (Parameters: mallopt(3).)
    """
    if any(name in os.environ for name in _USERS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    return all([bool(mallopt(option, value)) for option, value in _WANTED])
