"""A rank of `hvdtrain doctor`'s live check: sums numbers over all ranks with Horovod, and times it.

    python -m hvdtrain.cluster.doctor.live_rank torch|tensorflow LIMIT_S

Rank 0 prints what it measured as a line of JSON. Whatever waits for others is ended after LIMIT_S seconds.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable

MARK = "HVDTRAIN-LIVE "
NUMBERS = 4 << 20  # 16 MiB
TOO_LATE = 124  # exit code, as of timeout(1)
_REPEATS = 3


def main() -> int:
    framework, limit_s = sys.argv[1], float(sys.argv[2])
    watchdog = threading.Timer(limit_s, os._exit, [TOO_LATE])
    watchdog.daemon = True
    watchdog.start()
    rank, size, device, all_reduce = {"torch": _torch, "tensorflow": _tensorflow}[framework]()
    # the first one also opens the connections
    done = [all_reduce(number) for number in range(1 + _REPEATS)]
    right = all(its_right for its_right, _ in done)
    if rank == 0:
        result = {
            "size": size,
            "device": device,
            "right": right,
            "seconds": min(seconds for _, seconds in done[1:]),
            "bytes": 4 * NUMBERS,
        }
        print(MARK + json.dumps(result), flush=True)
    return 0 if right else 1


_Start = tuple[int, int, str, Callable[[int], tuple[bool, float]]]


def _torch() -> _Start:
    import horovod.torch as hvd
    import torch

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    # a GPU each, or none: ranks that share one are not what a job does
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= hvd.local_size()
    device = torch.device("cuda", hvd.local_rank()) if on_gpu else torch.device("cpu")
    base = (torch.arange(NUMBERS, device=device) % 7).float()

    def all_reduce(number: int) -> tuple[bool, float]:
        start = time.perf_counter()
        total = hvd.allreduce(base * (rank + 1), name=f"live.{number}", op=hvd.Sum)
        right = bool(torch.equal(total, base * (size * (size + 1) // 2)))
        return right, time.perf_counter() - start

    return rank, size, device.type, all_reduce


def _tensorflow() -> _Start:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    with tf.device("cpu"):
        base = tf.cast(tf.range(NUMBERS) % 7, tf.float32)

    def all_reduce(number: int) -> tuple[bool, float]:
        start = time.perf_counter()
        total = hvd.allreduce(base * (rank + 1), name=f"live.{number}", op=hvd.Sum)
        right = bool(tf.reduce_all(total == base * (size * (size + 1) // 2)))
        return right, time.perf_counter() - start

    return rank, size, "cpu", all_reduce


if __name__ == "__main__":
    sys.exit(main())
