"""What a sum over ranks costs, from measured seconds: a latency and a bandwidth for each range of sizes; and what that
makes of a training step on more ranks.

The cost of a message is Hockney's a + b S (Parallel Computing 20, 1994); ring and server send theirs one after another
as Thakur, Rabenseifner and Gropp count them (IJHPCA 19, 2005).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from hvdtrain.pipeline.plan.scaling import BACKWARD, BucketTiming, exchange, exposed

MOST_REGIMES = 3  # protocols and caches change with the size: one line does not hold from 1 KiB to 256 MiB
GOOD_ENOUGH = 0.05  # of an error on the fitted sizes: fewer regimes do as well


@dataclass(frozen=True)
class Regime:
    """Seconds of a size: `latency_s` + `s_per_byte` x size, from `first` to `last` bytes."""

    first: int
    last: int
    latency_s: float
    s_per_byte: float

    def seconds(self, size: float) -> float:
        return self.latency_s + self.s_per_byte * size


def fit(seconds: Mapping[int, float], most: int = MOST_REGIMES) -> list[Regime]:
    """The least regimes, each of two sizes or more, whose worst relative error on these sizes is small, else `most`.

    Args:
        seconds: by size in bytes; two sizes or more.
        most: regimes.
    """
    sizes = sorted(seconds)
    for count in range(1, most + 1):
        found = min(_cuts(sizes, seconds, count), key=lambda regimes: _squares(regimes, seconds), default=None)
        if found is None:
            break
        best = found
        if max(error(best, {size: seconds[size]}) for size in sizes) <= GOOD_ENOUGH:
            break
    return best


def predict(regimes: Sequence[Regime], size: float) -> float:
    """Seconds of a size; between two regimes the straight line between them on a log-log paper."""
    for one, following in zip(regimes, regimes[1:], strict=False):
        if one.last < size < following.first:
            share = math.log(size / one.last) / math.log(following.first / one.last)
            ends = one.seconds(one.last), following.seconds(following.first)
            return math.exp((1 - share) * math.log(ends[0]) + share * math.log(ends[1]))
    return next((one for one in regimes if size <= one.last), regimes[-1]).seconds(size)


def error(regimes: Sequence[Regime], seconds: Mapping[int, float]) -> float:
    """The median relative error of predictions, against these measured seconds."""
    return median(abs(predict(regimes, size) / its - 1) for size, its in seconds.items())


def _cuts(sizes: Sequence[int], seconds: Mapping[int, float], count: int) -> list[list[Regime]]:
    """Every way to cut the sizes into so many regimes of two and more."""
    if count == 1:
        return [[_line(sizes, seconds)]] if len(sizes) > 1 else []
    return [
        [_line(sizes[:cut], seconds), *others]
        for cut in range(2, len(sizes) - 1)
        for others in _cuts(sizes[cut:], seconds, count - 1)
    ]


def _line(sizes: Sequence[int], seconds: Mapping[int, float]) -> Regime:
    """The line of least squares of relative errors, neither latency nor slope below 0."""
    return Regime(sizes[0], sizes[-1], *_least_squares([(1 / seconds[size], size / seconds[size]) for size in sizes]))


def _least_squares(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Two numbers, not below 0, of which the rows make 1 as nearly as can be."""
    import numpy as np

    both = np.array(rows)
    found = np.linalg.lstsq(both, np.ones(len(rows)), rcond=None)[0]
    if min(found) < 0:  # the best is on the border: one of them alone explains it
        alone = [np.where(np.arange(2) == part, both[:, part].sum() / (both[:, part] ** 2).sum(), 0) for part in (0, 1)]
        found = min(alone, key=lambda its: float(((both @ its - 1) ** 2).sum()))
    return float(found[0]), float(found[1])


def _squares(regimes: Sequence[Regime], seconds: Mapping[int, float]) -> float:
    return sum((predict(regimes, size) / its - 1) ** 2 for size, its in seconds.items())


# ---- other numbers of ranks

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
    """The link that explains the measured seconds best, by least squares of relative errors; no cost is below 0.

    Args:
        way: "ring", "server" or "servers".
        seconds: by number of ranks, by size in bytes; two numbers in all or more.
    """
    messages, volume = COUNTS[way]
    rows = [
        (messages(ranks) / its, volume(ranks) * size / its)
        for ranks, sizes in seconds.items()
        for size, its in sizes.items()
    ]
    return LinkCost(*_least_squares(rows))


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
