"""One rank of the proof that a Horovod build works: ``python -m hvdtrain.horovod_build.prove_rank torch|tensorflow``.

All-reduce, broadcast and grouped all-reduce on values that differ by rank, each against the known answer. Prints one
line per rank that ends in "proven"; any wrong value raises.
"""

from __future__ import annotations

import sys


def main(framework: str) -> None:
    hvd, tensor, read = _torch() if framework == "torch" else _tensorflow()
    hvd.init()
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


def _torch():
    import horovod.torch as hvd
    import torch

    return hvd, lambda values: torch.tensor(values, dtype=torch.float64), lambda t: t.tolist()


def _tensorflow():
    import horovod.tensorflow as hvd
    import tensorflow as tf

    return hvd, lambda values: tf.constant(values, dtype=tf.float64), lambda t: t.numpy().tolist()


def _expect(what: str, got: list[float], wanted: list[float]) -> None:
    if got != wanted:
        raise RuntimeError(f"{what} gave {got}, expected {wanted}")


if __name__ == "__main__":
    main(sys.argv[1])
