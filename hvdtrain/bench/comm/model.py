"""What a link costs, from measured seconds of sums over ranks; and what that makes of a training step on more ranks.

The cost of a message is Hockney's a + b S (Parallel Computing 20, 1994); ring and server send theirs one after another
as Thakur, Rabenseifner and Gropp count them (IJHPCA 19, 2005).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hvdtrain.pipeline.plan.scaling import BACKWARD, BucketTiming, exchange, exposed

# messages one after another, and bytes through the busiest link in one direction as a multiple of the array's
Counts = tuple[Callable[[int], float], Callable[[int], float]]
COUNTS: dict[str, Counts] = {
    "ring": (lambda ranks: 2 * (ranks - 1), lambda ranks: 2 * (ranks - 1) / ranks),
    "server": (lambda ranks: 2, lambda ranks: ranks - 1),
    "servers": (lambda ranks: 2, lambda ranks: 2 * (ranks - 1) / ranks),
}


@dataclass(frozen=True)
class LinkCost:
    """Of one link in one direction: seconds of a message, and of a byte."""

    latency_s: float
    s_per_byte: float

    def seconds(self, way: str, ranks: int, size: float) -> float:
        """Of a sum of `size` bytes over that many ranks."""
        messages, volume = COUNTS[way]
        return 0.0 if ranks == 1 else self.latency_s * messages(ranks) + self.s_per_byte * volume(ranks) * size


def link_cost(way: str, seconds: Mapping[int, Mapping[int, float]]) -> LinkCost:
    """Returns the link that explains the measured seconds best, by least squares of relative errors.

    Args:
        way: "ring", "server" or "servers".
        seconds: by number of ranks, by size in bytes; two numbers in all or more.
    """
    import numpy as np

    messages, volume = COUNTS[way]
    both = np.array([
        (messages(ranks) / its, volume(ranks) * size / its)
        for ranks, sizes in seconds.items()
        for size, its in sizes.items()
    ])  # fmt: skip
    found = np.linalg.lstsq(both, np.ones(len(both)), rcond=None)[0]
    if min(found) < 0:  # the best is on the border: one of them alone explains it
        alone = [np.where(np.arange(2) == part, both[:, part].sum() / (both[:, part] ** 2).sum(), 0) for part in (0, 1)]
        found = min(alone, key=lambda its: float(((both @ its - 1) ** 2).sum()))
    return LinkCost(float(found[0]), float(found[1]))


BUCKET_BYTES = 25 << 20  # of gradients that travel together (hvdtrain's and DistributedDataParallel's)
RANKS = (2, 4, 8, 16, 32, 64)


def steps(
    buckets: Sequence[BucketTiming], step_s: float, costs: Mapping[str, LinkCost]
) -> dict[str, dict[int, dict[str, float]]]:
    """What a training step takes on more ranks, the batch a rank the same.

    Args:
        buckets: of gradients.
        step_s: of one device alone.
        costs: of a link, by way.

    Returns:
        By way, by number of ranks: "sum_s", the seconds of all sums; "step_s", with what is not hidden behind the
        backward pass; "efficiency", alone over that.
    """
    found: dict[str, dict[int, dict[str, float]]] = {}
    for way, cost in costs.items():
        for ranks in RANKS:
            sums = exchange(buckets, step_s * BACKWARD, partial(cost.seconds, way, ranks))
            whole, sum_s = step_s + sum(exposed(sums, step_s * BACKWARD)), sum(its.end_s - its.begin_s for its in sums)
            found.setdefault(way, {})[ranks] = {"sum_s": sum_s, "step_s": whole, "efficiency": step_s / whole}
    return found


def crossings(one: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """Sizes at which two ways take equally long, on straight lines between the measured ones on a log-log paper."""
    sizes = sorted(one.keys() & other.keys())
    gaps = [math.log(one[size] / other[size]) for size in sizes]
    return [
        math.exp(math.log(left) + gap / (gap - following) * math.log(right / left))
        for left, right, gap, following in zip(sizes, sizes[1:], gaps, gaps[1:], strict=False)
        if gap * following < 0
    ]
