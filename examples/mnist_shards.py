"""MNIST in contiguous shards, one a worker, whose gradients are added up: by threads, by processes, or by MPI.

    python examples/mnist_shards.py --by threads --workers 4
    python examples/mnist_shards.py --by processes --workers 4
    mpirun -np 4 python examples/mnist_shards.py --by mpi

Softmax regression in numpy, so that the shards are all there is to see. All three give the same weights: a gradient is
a sum over samples, however they are cut. With MPI the workers may be on many hosts, and Horovod's ranks are MPI's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np

import hvdtrain
from hvdtrain.datasets import load_mnist

UPDATES, RATE, CLASSES = 60, 0.5, 10


def shard(worker: int, workers: int) -> tuple[np.ndarray, np.ndarray]:
    """A worker's pictures [samples, pixels] in 0..1, and their labels."""
    images = load_mnist("digits")
    mine = hvdtrain.contiguous(len(images.x_train), worker, workers)
    return images.x_train[mine].reshape(-1, 28 * 28) / 255, images.y_train[mine]


def loss_and_gradient(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Sums over a shard: the loss, its gradient, and how many samples; as one flat array."""
    scores = x @ weights
    scores -= scores.max(axis=1, keepdims=True)
    log_shares = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    wanted = np.eye(CLASSES)[y]
    return np.concatenate([[-(wanted * log_shares).sum(), len(y)], (x.T @ (np.exp(log_shares) - wanted)).ravel()])


def of_shard(weights: np.ndarray, worker: int, workers: int) -> np.ndarray:
    """What a worker process is asked for; it reads its shard once."""
    if (worker, workers) not in _SHARDS:
        _SHARDS[worker, workers] = shard(worker, workers)
    return loss_and_gradient(weights, *_SHARDS[worker, workers])


_SHARDS: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}


def train(sum_over_shards: Callable[[np.ndarray], np.ndarray], *, talks: bool = True) -> None:
    """Gradient descent on all samples at once."""
    weights = np.zeros((28 * 28, CLASSES))
    for update in range(1, UPDATES + 1):
        total = sum_over_shards(weights)
        loss, samples, gradient = total[0], total[1], total[2:].reshape(weights.shape)
        weights -= RATE * gradient / samples
        if talks and update in (1, UPDATES):
            print(f"update {update}: loss {loss / samples:.10f} over {samples:.0f} samples")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=["threads", "processes", "mpi"], default="threads")
    parser.add_argument("--workers", type=int, default=2, help="threads or processes; mpirun says how many ranks")
    args = parser.parse_args()
    if args.by == "mpi":
        with hvdtrain.init("torch", device="cpu") as world:
            mine = shard(world.rank, world.size)

            def over_ranks(weights: np.ndarray) -> np.ndarray:
                total = loss_and_gradient(weights, *mine)
                result = np.empty_like(total)
                world.mpi.Allreduce(total, result)
                return result

            train(over_ranks, talks=world.is_main)
        return
    executor = ThreadPoolExecutor if args.by == "threads" else ProcessPoolExecutor
    if args.workers < 1:
        parser.error("--workers is 1 or more")
    with executor(args.workers) as pool:
        every = range(args.workers)

        def over_workers(weights: np.ndarray) -> np.ndarray:
            jobs = [pool.submit(of_shard, weights, worker, args.workers) for worker in every]
            return sum(job.result() for job in jobs)

        train(over_workers)


if __name__ == "__main__":
    main()
