"""What segments and stages of a model cost, in seconds and bytes; pure.

`simulate` runs a schedule with these costs, `partition` cuts a chain of segments into stages, `search` ranks whole
plans.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvdtrain.core.errors import ConfigError


@dataclass(frozen=True)
class Curve:
    """A cost (seconds or bytes) as a function of samples: straight lines through measured points.

    A single point means proportional to the samples; a single point at 0 samples, a constant. Beyond the points the
    outermost lines continue, but fewer samples never cost more, and few samples never cost less than their share.
    """

    points: tuple[tuple[float, float], ...]  # (samples, value), kept in ascending order

    def __post_init__(self) -> None:
        points = tuple(sorted((float(samples), float(value)) for samples, value in self.points))
        if not points or points[0][0] < 0 or len({samples for samples, _ in points}) < len(points):
            raise ConfigError("a curve needs points at different numbers of samples, none below 0", repr(self.points))
        object.__setattr__(self, "points", points)

    @classmethod
    def constant(cls, value: float) -> Curve:
        """Returns a curve with the same value for any number of samples."""
        return cls(((0.0, value),))

    @classmethod
    def per_sample(cls, value: float) -> Curve:
        """Returns a curve proportional to the samples."""
        return cls(((1.0, value),))

    def __call__(self, samples: float) -> float:
        points = self.points
        (first_at, first), (last_at, last) = points[0], points[-1]
        if len(points) == 1:
            return first if first_at == 0 else first * samples / first_at
        if samples < first_at:
            return min(max(_line(points[0], points[1], samples), first * samples / first_at), first)
        if samples > last_at:
            return max(_line(points[-2], points[-1], samples), last)
        at = max(1, bisect.bisect_left(points, (samples, -math.inf)))
        return points[0][1] if samples == first_at else _line(points[at - 1], points[at], samples)

    def __add__(self, other: Curve) -> Curve:
        both = sorted({samples for samples, _ in (*self.points, *other.points)})
        return Curve(tuple((samples, self(samples) + other(samples)) for samples in both))

    def __mul__(self, factor: float) -> Curve:
        return Curve(tuple((samples, value * factor) for samples, value in self.points))

    __rmul__ = __mul__


def _line(a: tuple[float, float], b: tuple[float, float], at: float) -> float:
    part = (at - a[0]) / (b[0] - a[0])
    return a[1] * (1 - part) + b[1] * part


ZERO = Curve.constant(0.0)


def total(curves: Iterable[Curve]) -> Curve:
    """Returns the sum of curves."""
    return sum(curves, ZERO)


@dataclass(frozen=True)
class SegmentCost:
    """The cost of one segment of a model, on the device it was measured on."""

    name: str
    # forward_s, backward_s: over the samples of a micro-batch; backward without any recomputation
    forward_s: Curve
    backward_s: Curve
    fixed_bytes: int = 0  # held all the time: parameters, gradients, the optimizer's state, buffers
    gradient_bytes: int = 0  # of these the gradients, which replicas send
    activation_bytes: Curve = ZERO  # kept from the forward to the backward pass; its input belongs to it if it is kept
    output_bytes: Curve = ZERO  # what crosses to the next segment (and as a gradient back)


@dataclass(frozen=True)
class Device:
    """A device that runs a stage."""

    name: str
    speed: float = 1.0  # against the device that the costs were measured on
    memory_bytes: float | None = None  # what training may use of it; None: no limit
    ahead: int = 0  # passes that may be queued on it: what was received for them, values or gradients, is held as long


@dataclass(frozen=True)
class Link:
    """The link from a stage to the next one and back; each direction carries one tensor at a time."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf

    def seconds(self, size_bytes: float) -> float:
        """Returns the seconds of one transfer."""
        return self.latency_s + size_bytes / self.bytes_per_s


def ring_link(ranks: int, per_host: int, inside: Link, between: Link) -> Link:
    """Returns the link that limits a ring of so many ranks over hosts: the narrowest bandwidth, and the mean latency of
    the hops, as data crosses each hop once. (NCCL's graph/tuning.cc adds latencies up in the same way.)"""
    if ranks <= per_host:
        return inside
    across = -(-ranks // per_host)
    latency_s = (across * between.latency_s + (ranks - across) * inside.latency_s) / ranks
    narrowest = min(between.bytes_per_s, inside.bytes_per_s) if per_host > 1 else between.bytes_per_s
    return Link(latency_s, narrowest)


def all_reduce_seconds(size_bytes: float, replicas: int, link: Link) -> float:
    """A ring all-reduce: each replica sends `2 (n - 1) / n` of the bytes in `2 (n - 1)` messages (Patarasuk and
    Yuan, "Bandwidth optimal all-reduce algorithms", 2009)."""
    rounds = 2 * (replicas - 1)
    return rounds * link.seconds(size_bytes / replicas)


@dataclass(frozen=True)
class StageCost:
    """A stage: the sum of its segments, on its device."""

    device: Device
    # forward_s, backward_s: on this device, alone on it
    forward_s: Curve
    backward_s: Curve
    output_bytes: Curve = ZERO  # what crosses to the next stage


def stage_costs(costs: Sequence[SegmentCost], sizes: Sequence[int], devices: Sequence[Device]) -> list[StageCost]:
    """Returns the stages that contiguous groups of so many segments make; raises `ConfigError` for what is no cut."""
    if len(sizes) != len(devices) or sum(sizes) != len(costs) or min(sizes, default=0) < 1:
        raise ConfigError(
            "a cut must give every device at least one segment, and every segment a device",
            f"{list(sizes)} of {len(costs)} segments on {len(devices)} device(s)",
            f"{len(devices)} whole numbers, at least 1, that sum to {len(costs)}",
        )
    stages, end = [], 0
    for size, device in zip(sizes, devices, strict=True):
        mine, end = costs[end : end + size], end + size
        forward_s = total(cost.forward_s for cost in mine) * (1 / device.speed)
        backward_s = total(cost.backward_s for cost in mine) * (1 / device.speed)
        stages.append(StageCost(device, forward_s, backward_s, mine[-1].output_bytes))
    return stages


def working_bytes(activations: Sequence[float], tensors: Sequence[float]) -> list[float]:
    """Returns what a backward pass through the first segment, the first two, ... holds beside their activations.

    A segment's pass holds the gradients of its output and of its input; the activations of those after it are gone.
    `tensors`: bytes of what the first one receives, then of each one's output.
    """
    found, most = [], 0.0
    for kept, before, after in zip(activations, tensors, tensors[1:], strict=False):
        most = max(most - kept, before + after)
        found.append(most)
    return found
