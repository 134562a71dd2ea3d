"""Data-parallel training on more ranks than there are here: a step in discrete events, from measured costs; pure.

Gradients become ready in the backward pass, the last layer's first. Once a cycle all ranks send the first one the names
of theirs, and it answers with what to sum (Horovod: Sergeev and Del Balso, arXiv:1802.05799); sums take the link one
after another. What outlasts the backward pass is exposed. A step waits for the slowest of all ranks.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from hvdtrain.pipeline.plan.costs import Link, all_reduce_seconds, ring_link

Way = Literal["ring", "hierarchical", "tree"]
MOST_RANKS = 1 << 20  # that are looked at
BACKWARD = 2 / 3  # of a step: twice the forward pass's operations


class BucketTiming(NamedTuple):
    """Gradients that travel together: bytes, and the share of the backward pass that is done when they are ready."""

    size_bytes: float
    ready: float


class Sum(NamedTuple):
    """An all-reduce: when it begins and ends on the link, in seconds since the backward pass began."""

    begin_s: float
    end_s: float
    size_bytes: float


def exchange(
    buckets: Sequence[BucketTiming],
    backward_s: float,
    seconds: Callable[[float], float],
    *,
    cycle_s: float = 0.0,
    negotiation_s: float = 0.0,
    fusion_bytes: float = 0.0,
) -> list[Sum]:
    """Returns the sums of a step, one after another; `seconds`: of a sum of so many bytes.

    A cycle begins `cycle_s` after the one before, or when that one's sums are done; it takes `negotiation_s`, then sums
    what was ready when it began, neighbours together up to `fusion_bytes`.
    """
    period_s, cycle_at_s = max(cycle_s, negotiation_s), 0.0
    waiting, found = deque(buckets), list[Sum]()
    while waiting:
        ready_s = waiting[0].ready * backward_s
        if ready_s > cycle_at_s:  # cycles in which there is nothing to do
            idle = math.ceil((ready_s - cycle_at_s) / period_s) * period_s if period_s else 0.0
            cycle_at_s = max(ready_s, cycle_at_s + idle)
        free_s = cycle_at_s + negotiation_s
        while waiting and waiting[0].ready * backward_s <= cycle_at_s:
            size = waiting.popleft().size_bytes
            while (
                waiting and waiting[0].ready * backward_s <= cycle_at_s and size + waiting[0].size_bytes <= fusion_bytes
            ):
                size += waiting.popleft().size_bytes
            found.append(Sum(free_s, free_s + seconds(size), size))
            free_s = found[-1].end_s
        cycle_at_s = max(free_s, cycle_at_s + cycle_s)
    return found


def exposed(sums: Sequence[Sum], backward_s: float) -> tuple[float, float]:
    """Seconds after the backward pass in which gradients are on the link, and in which they wait for a cycle."""
    after_s = max(0.0, sums[-1].end_s - backward_s) if sums else 0.0
    on_link_s = math.fsum(max(0.0, its.end_s - max(its.begin_s, backward_s)) for its in sums)
    return on_link_s, max(0.0, after_s - on_link_s)


@dataclass(frozen=True)
class Network:
    """Hosts that are alike, and how Horovod uses them."""

    # between, inside: the link of a host to the others, which its ranks share, and of two ranks in it
    between: Link
    inside: Link
    per_host: int = 8  # ranks on a host
    way: Way = "ring"  # or "hierarchical": over a host's ranks, then over one a host; "tree": NCCL's two trees
    cycle_s: float = 0.0  # from one negotiation to the next, at least (HOROVOD_CYCLE_TIME)
    coordinator_s: float = 0.0  # that the first rank takes for what one rank tells it in a cycle
    fusion_bytes: float = 0.0  # that are summed together at most (HOROVOD_FUSION_THRESHOLD)

    def all_reduce_s(self, size_bytes: float, ranks: int) -> float:
        """Returns the seconds of a sum over so many ranks; 0 for one rank."""
        local, hosts = min(ranks, self.per_host), -(-ranks // self.per_host)
        if self.way == "hierarchical":
            inside_s = all_reduce_seconds(size_bytes, local, self.inside)
            return inside_s + all_reduce_seconds(size_bytes, hosts, self.between)
        if self.way == "tree" and ranks > 1:  # up and down, pipelined: as NCCL's graph/tuning.cc counts
            hops_s = (local - 1) * self.inside.latency_s + math.ceil(math.log2(hosts)) * self.between.latency_s
            return 2 * (hops_s + size_bytes / self._ring(ranks).bytes_per_s)
        return all_reduce_seconds(size_bytes, ranks, self._ring(ranks))

    def negotiation_s(self, ranks: int) -> float:
        """Returns the seconds until the first rank has handled all ranks' messages in turn and answered down a tree."""
        latency_s = self.between.latency_s if ranks > self.per_host else self.inside.latency_s
        return (1 + math.ceil(math.log2(ranks))) * latency_s + (ranks - 1) * self.coordinator_s

    def _ring(self, ranks: int) -> Link:
        return ring_link(ranks, self.per_host, self.inside, self.between)


@dataclass(frozen=True)
class MeasuredStep:
    """A step of one rank, as measured."""

    compute_s: tuple[float, ...]  # of each step that was measured, of any rank, without communication
    backward_s: float  # of a step, the backward pass before which gradients leave
    buckets: tuple[BucketTiming, ...]  # in the order in which they become ready
    samples: float = 1.0  # of a rank's step

    def slowest_s(self, ranks: int) -> float:
        """The expected maximum of so many draws from the measured steps: exact, so there is no seed."""
        ordered, count = sorted(self.compute_s), len(self.compute_s)
        return math.fsum(its * (((n + 1) / count) ** ranks - (n / count) ** ranks) for n, its in enumerate(ordered))


@dataclass(frozen=True)
class StepCost:
    """A predicted step, in seconds; they add up to it."""

    ranks: int
    compute_s: float  # the mean of a rank's
    straggler_s: float  # how much later the slowest of all ranks is, in the mean
    exposed_communication_s: float  # sums that the backward pass does not hide
    negotiation_s: float  # what is left of waiting for them: cycles, and the first rank's round
    samples: float

    @property
    def step_s(self) -> float:
        """The seconds of the whole step."""
        return self.compute_s + self.straggler_s + self.exposed_communication_s + self.negotiation_s

    @property
    def efficiency(self) -> float:
        """The speed of each rank, as a share of that of a rank alone."""
        return self.compute_s / self.step_s

    @property
    def samples_per_s(self) -> float:
        return self.ranks * self.samples / self.step_s


def predict(training: MeasuredStep, network: Network, ranks: int) -> StepCost:
    """A step on so many ranks; one alone has nothing to send."""
    compute_s = math.fsum(training.compute_s) / len(training.compute_s)
    on_link_s = waiting_s = 0.0
    if ranks > 1:
        sums = exchange(
            training.buckets, training.backward_s, lambda size: network.all_reduce_s(size, ranks),
            cycle_s=network.cycle_s, negotiation_s=network.negotiation_s(ranks), fusion_bytes=network.fusion_bytes,
        )  # fmt: skip
        on_link_s, waiting_s = exposed(sums, training.backward_s)
    slowest_s = max(compute_s, training.slowest_s(ranks))
    return StepCost(ranks, compute_s, slowest_s - compute_s, on_link_s, waiting_s, training.samples)


def first_below(training: MeasuredStep, network: Network, efficiency: float) -> int | None:
    """Returns the fewest ranks, whole hosts, whose efficiency is below; None: none up to `MOST_RANKS`. By halving."""
    sizes = range(network.per_host, MOST_RANKS + 1, network.per_host)
    found = bisect.bisect_left(sizes, True, key=lambda ranks: predict(training, network, ranks).efficiency < efficiency)
    return sizes[found] if found < len(sizes) else None


def remedies(training: MeasuredStep, network: Network, ranks: int) -> dict[str, StepCost]:
    """The step with one thing changed, the most efficient first.

    Twice the batch, and two batches an update, are taken to compute twice as long; the latter hides sums behind the
    last backward pass only.
    """
    twice = replace(training, compute_s=tuple(2 * its for its in training.compute_s), samples=2 * training.samples)
    half = tuple(BucketTiming(its.size_bytes / 2, its.ready) for its in training.buckets)
    found = {
        "twice the batch": predict(replace(twice, backward_s=2 * training.backward_s), network, ranks),
        "two batches an update": predict(twice, network, ranks),
        "gradients in 16 bits": predict(replace(training, buckets=half), network, ranks),
    } | {
        f"a {way} all-reduce": predict(training, replace(network, way=way), ranks)
        for way in get_args(Way)
        if way != network.way
    }
    return dict(sorted(found.items(), key=lambda item: -item[1].efficiency))
