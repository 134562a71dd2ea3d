"""One rank of the proof that Horovod works: `python -m hvdtrain.horovod_build.prove_rank torch|tensorflow`.

All-reduce, broadcast and grouped all-reduce on values that differ by rank, each against the known answer. Prints one
line per rank that ends in "proven"; any wrong value raises.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

TOO_LATE = 124  # the exit code of a rank that ends itself at its limit, as of timeout(1)

Tensor = Callable[[Any], Any]  # of a framework, from numbers
Read = Callable[[Any], "np.ndarray"]


def main(framework: str) -> None:
    hvd, tensor, read = _torch() if framework == "torch" else _tensorflow()
    rank, size = hvd.rank(), hvd.size()
    mean = (size - 1) / 2
    _expect("all-reduce", read(hvd.allreduce(tensor([rank, 10.0 * rank]), op=hvd.Average, name="a")), [mean, 10 * mean])
    _expect("broadcast", read(hvd.broadcast(tensor([rank + 5.0]), 1 % size, name="b")), [1 % size + 5.0])
    group = [tensor([float(rank)]), tensor([1.0, rank * 2.0])]
    reduced = hvd.grouped_allreduce(group, op=hvd.Sum, name="g")
    _expect("grouped all-reduce", read(reduced[0]), [mean * size])
    _expect("grouped all-reduce", read(reduced[1]), [float(size), 2 * mean * size])
    built = ", ".join(name for name in ("mpi", "gloo", "nccl") if getattr(hvd, f"{name}_built")())
    via = "MPI" if hvd.mpi_enabled() else "Gloo"
    hvd.shutdown()
    print(f"{framework} rank {rank} of {size} over {via} (built with {built}): proven", flush=True)


def end_after(limit_s: float) -> None:
    """Lets this process end itself then: whatever it waits for will not come."""
    watchdog = threading.Timer(limit_s, os._exit, [TOO_LATE])
    watchdog.daemon = True
    watchdog.start()


def _torch() -> tuple[Any, Tensor, Read]:
    import horovod.torch as hvd
    import torch

    hvd.init()
    # a GPU each, or none: ranks that share one are not what a job does
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= hvd.local_size()
    device = torch.device("cuda", hvd.local_rank()) if on_gpu else torch.device("cpu")
    return hvd, lambda v: torch.tensor(v, dtype=torch.float64, device=device), lambda t: t.cpu().numpy()


def _tensorflow() -> tuple[Any, Tensor, Read]:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()

    def tensor(values: Any) -> Any:
        with tf.device("cpu"):
            return tf.constant(values, dtype=tf.float64)

    return hvd, tensor, lambda t: t.numpy()


def _expect(what: str, got: np.ndarray, wanted: list[float]) -> None:
    if got.tolist() != wanted:
        raise RuntimeError(f"{what} gave {got.tolist()}, expected {wanted}")


if __name__ == "__main__":
    main(sys.argv[1])
