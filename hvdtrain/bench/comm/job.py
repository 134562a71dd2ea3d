"""One rank of `hvdtrain bench comm`: sums arrays in one way or another, turn by turn.

Under MPI it has all ways, under horovodrun on Gloo Horovod's alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from hvdtrain.bench.comm.ways import WAYS, CountedLinks
from hvdtrain.bench.turns.turns import pin
from hvdtrain.comm.turns import orders

# puts an array where it is summed; sums it over ranks, maybe in place; returns an array, once the sum is there
SumWay = tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]]


def way_of(name: str, links: CountedLinks | None, device: str) -> SumWay:
    """Returns conversion, sum and conversion back: mpi4py sums numpy arrays, Horovod tensors of its device."""
    if name != "horovod":
        return lambda values: values, partial(WAYS[name], links), lambda values: values  # type: ignore[arg-type]
    import horovod.torch as hvd
    import torch

    return (
        lambda values: torch.from_numpy(values).to(device),
        lambda values: hvd.allreduce_(values, op=hvd.Sum, name=f"bench.{len(values)}"),
        lambda values: values.cpu().numpy(),
    )


def main() -> int:
    """Pins this rank to a core, joins the others, answers orders until the bench ends."""
    import hvdtrain
    from hvdtrain.core.launchers import detect

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    args = parser.parse_args()
    detected = detect(os.environ)
    if args.device == "cpu":
        pin(detected.local_rank)
    world = hvdtrain.init("torch", device=args.device)
    links = None if detected.launcher == "horovodrun" else CountedLinks(world.mpi)
    for order, connection in orders(world.rank):
        connection.send(measure(way_of(order["way"], links, args.device), world, links, order))
    return 0


def measure(way: SumWay, world: Any, links: CountedLinks | None, order: dict[str, Any]) -> dict[str, Any]:
    """Returns seconds of a sum, mean over some; bytes that this rank sent in one; whether the sum is numpy's.

    The order: "bytes" of the array, "repeat": how often, "late_s": seconds by which each rank comes late to each sum.
    """
    import numpy as np

    put, add, get = way

    pattern = np.arange(order["bytes"] // 4, dtype=np.float32) % 7  # whole numbers: their sums are exact in any order
    total = get(add(put(pattern * (world.rank + 1))))
    exact = np.array_equal(total, pattern * (world.size * (world.size + 1) // 2))
    values = put(np.zeros_like(pattern))
    late_s = order.get("late_s", {}).get(world.rank, 0.0)
    world.comm.barrier()  # not the world's: a bench that stops ranks between turns would look out of step
    sent = Counter(links.sent) if links else Counter()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(order["repeat"]):
        if late_s:
            time.sleep(late_s)
        values = add(values)
    get(values[:1])  # a GPU is done when its answer is here
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    world.comm.barrier()
    count = order["repeat"]
    return {
        "wall": wall / count, "cpu": cpu / count, "exact": bool(exact),
        "sent": {peer: total / count for peer, total in (Counter(links.sent) - sent).items()} if links else {},
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
