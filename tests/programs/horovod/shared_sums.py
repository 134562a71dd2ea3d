"""Sums of what numpy draws, on Horovod alone, against numpy's: bit for bit where one host has all ranks.

Arguments: `shared` (ranks must share memory) or `sockets` (none may); how many hosts, where sums must be exact.
"""

from __future__ import annotations

import sys
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import torch

EDGE = (512 << 10) // 8  # of float64, what one turn takes
SIZES = (0, 1, 7, 8, 9, 63, 1000, EDGE - 1, EDGE, EDGE + 1, 2 * EDGE, 3 * EDGE + 5, 9 * EDGE + 77)
TYPES = (np.float32, np.float64, np.int32, np.int64, np.float16)  # the last one goes over sockets


def draw(rank: int, number: int, size: int, kind: type, *, exact: bool) -> np.ndarray:
    """What one rank has; `exact`: whole numbers, whose sums do not depend on their order."""
    random = np.random.default_rng([rank, number])
    if exact or not issubclass(kind, np.floating):
        return random.integers(0, 9, size).astype(kind)
    return random.standard_normal(size).astype(kind)


def wanted(arrays: list[np.ndarray], before: float, after: float) -> np.ndarray:
    """The sum, rank by rank, in the arrays' own precision."""
    kind = arrays[0].dtype.type
    floating = issubclass(kind, np.floating)
    first, *others = [(kind(before) * its if floating else (before * its).astype(kind)) for its in arrays]
    for its in others:
        first = first + its
    return kind(after) * first if floating else (after * first).astype(kind)


def same(found: torch.Tensor, right: np.ndarray, *, bits: bool, what: object) -> None:
    its = found.numpy().reshape(-1)
    fine = np.array_equal(its, right) if bits else np.allclose(its, right, rtol=1e-2, atol=0.05)
    assert fine, (hvd.rank(), what, its[its != right][:3], right[its != right][:3])


def main(how: str, hosts: int = 1) -> None:
    hvd.init()
    ranks, exact = range(hvd.size()), hosts > 1
    number = 0
    for kind in TYPES:
        for size in SIZES:
            for before, after in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.25), (3.0, 0.5)):
                number += 1
                arrays = [draw(rank, number, size, kind, exact=exact) for rank in ranks]
                own = torch.from_numpy(arrays[hvd.rank()].copy())
                what = (kind.__name__, size, before, after)
                kept = own.clone()
                found = hvd.allreduce(
                    own, op=hvd.Sum, prescale_factor=before, postscale_factor=after, name=f"one.{number}"
                )
                same(found, wanted(arrays, before, after), bits=kind is not np.float16, what=what)
                assert torch.equal(own, kept), what
        # many at once: pieces of odd sizes, fused, in place
        sizes = [1, 3, EDGE - 2, 5, 0, 2 * EDGE + 1, 64, 65, *range(1, 40)]
        many = [[draw(rank, 10_000 + n, size, kind, exact=exact) for rank in ranks] for n, size in enumerate(sizes)]
        tensors = [torch.from_numpy(arrays[hvd.rank()].copy()) for arrays in many]
        hvd.grouped_allreduce_(tensors, op=hvd.Sum, name=f"many.{kind.__name__}")
        for n, (tensor, arrays) in enumerate(zip(tensors, many, strict=True)):
            same(tensor, wanted(arrays, 1, 1), bits=kind is not np.float16, what=(kind.__name__, "fused", n))
    halves = [draw(rank, 5, 1 << 20, np.float32, exact=exact) for rank in ranks]
    mean = hvd.allreduce(torch.from_numpy(halves[hvd.rank()].copy()), op=hvd.Average, name="mean")
    same(mean, wanted(halves, 1, 1 / hvd.size()), bits=True, what="mean")
    # before the last sum: a rank that is ahead shuts all down
    mapped = "memfd:horovod" in Path("/proc/self/maps").read_text()
    assert mapped == (how == "shared"), (hvd.rank(), how, mapped)
    largest = hvd.allreduce(torch.from_numpy(halves[hvd.rank()].copy()), op=hvd.Max, name="largest")
    same(largest, np.max(halves, axis=0), bits=True, what="largest")
    hvd.shutdown()
    assert "memfd:horovod" not in Path("/proc/self/maps").read_text(), "left mapped"
    print(f"right: {number} sums")


main(sys.argv[1], *map(int, sys.argv[2:]))
