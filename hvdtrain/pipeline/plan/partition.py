"""Which segments make a stage: the exact optimum over contiguous cuts, by dynamic programming; pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.plan.costs import Device, Link, SegmentCost, stage_costs, working_bytes
from hvdtrain.pipeline.plan.schedule import (
    Action,
    Remat,
    Schedule,
    footprints,
    micro_batch_sizes,
    recomputed,
    stage_orders,
)
from hvdtrain.pipeline.plan.simulate import links_between

SAME = 1 + 1e-9  # sums in another order differ by less
Balance = Literal["time", "memory"] | Sequence[int]
# of the segments [begin, end) as stage number k
Measure = Callable[[int, int, int], float]


@dataclass(frozen=True)
class Partition:
    """A cut."""

    sizes: tuple[int, ...]  # segments of each stage
    stage_s: tuple[float, ...]  # of each stage in a step: its passes, or its transfers if they take longer
    stage_bytes: tuple[float, ...]  # of each stage at its peak
    bottleneck_s: float  # of the slowest stage: no schedule gets a step done in less


def partition(
    costs: Sequence[SegmentCost],
    devices: Sequence[Device],
    *,
    batch: int,
    micro_batches: int,
    schedule: Schedule = "1f1b",
    remat: Remat = "never",
    links: Link | Sequence[Link] = Link(),  # noqa: B008 - frozen
    balance: Balance = "time",
) -> Partition:
    """Cuts a chain of segments into one stage a device, in the order of the devices.

    "time" minimises the slowest stage's time in a step, and of cuts that are equal in that the largest stage's bytes;
    "memory" the other way round. Both keep to each device's memory. A cut by hand (segments of each stage) is taken as
    it is. Raises `ConfigError` for more stages than segments, if no cut fits, or for a cut by hand that is none.
    """
    if not 1 <= len(devices) <= len(costs):
        raise ConfigError(
            "every stage needs at least one segment of the model",
            f"{len(devices)} devices, {len(costs)} segments: {', '.join(cost.name for cost in costs)}",
            f"between 1 and {len(costs)} devices",
        )
    orders = stage_orders(schedule, len(devices), micro_batches)
    between = links_between(links, len(devices))
    chain = _Chain(costs, devices, micro_batch_sizes(batch, micro_batches), orders, remat, between)
    if not isinstance(balance, str):
        stage_costs(costs, balance, devices)  # refuses what is no cut
        return chain.partition_of(balance)
    if balance not in ("time", "memory"):
        raise ConfigError('balance= must be "time", "memory" or the number of segments of each stage', repr(balance))
    first, second = (chain.seconds, chain.bytes) if balance == "time" else (chain.bytes, chain.seconds)
    least, _ = _best(chain, first)
    if not math.isfinite(least):
        raise _fits_nowhere(chain, devices)
    _, sizes = _best(chain, second, within=(first, least * SAME))
    return chain.partition_of(sizes)


def _best(
    chain: _Chain, measure: Measure, *, within: tuple[Measure, float] | None = None, anywhere: bool = False
) -> tuple[float, list[int]]:
    """Returns the cut with the least largest `measure` of a stage, of those that fit; infinite: there is none.

    Linear partitioning (Skiena, The Algorithm Design Manual, section 10.7): the best cut of the first `end` segments
    into k + 1 stages adds one stage to a best cut of fewer segments into k. `within`: a second measure, and its limit.
    """
    count, stages = chain.segments, chain.stages
    best = [0.0] + [math.inf] * count  # of the first n segments in as many stages as were added so far
    cuts: list[list[int]] = []
    other, limit = within or (None, math.inf)
    for stage in range(stages):
        added, begins = [math.inf] * (count + 1), [0] * (count + 1)
        for end in range(stage + 1, count - (stages - stage - 1) + 1):
            for begin in range(end - 1, stage - 1, -1) if stage else (0,):
                if chain.least(measure, begin, end, stage) >= added[end]:
                    break  # a longer stage is no better
                if other is not None and chain.least(other, begin, end, stage) > limit:
                    break  # and no longer one is allowed
                if best[begin] >= added[end] or (other is not None and other(begin, end, stage) > limit):
                    continue
                value = max(best[begin], measure(begin, end, stage))
                if value < added[end] and (anywhere or not chain.overflow(begin, end, stage)):
                    added[end], begins[end] = value, begin
        best = added
        cuts.append(begins)
    sizes, end = [], count
    for begins in reversed(cuts):
        sizes.append(end - begins[end])
        end = begins[end]
    return best[count], sizes[::-1]


def _fits_nowhere(chain: _Chain, devices: Sequence[Device]) -> ConfigError:
    """Names what each device would need in the cut that comes nearest."""
    _, sizes = _best(chain, chain.share_of_memory, anywhere=True)
    needs = chain.partition_of(sizes).stage_bytes
    lines = [
        f"{device.name}: {in_words(need)} needed"
        + (f", {in_words(device.memory_bytes)} there" if device.memory_bytes else "")
        for device, need in zip(devices, needs, strict=True)
    ]
    return ConfigError(
        "every stage must fit into its device's memory",
        f"the cut that comes nearest, {sizes}:\n" + "\n".join(lines),
        'more micro-batches, remat="all", more devices, or a smaller batch',
    )


def in_words(size_bytes: float) -> str:
    """Returns bytes as text, in a fitting unit."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes:.0f} bytes"


class _Chain:
    """Time and memory of any group of segments as any stage, from running sums."""

    def __init__(
        self,
        costs: Sequence[SegmentCost],
        devices: Sequence[Device],
        sizes: Sequence[int],
        orders: Sequence[Sequence[Action]],
        remat: Remat,
        links: Sequence[Link],
    ) -> None:
        self.segments, self.stages = len(costs), len(devices)
        self._ahead = [device.ahead for device in devices]
        self._limits = [math.inf if device.memory_bytes is None else device.memory_bytes for device in devices]
        counts = Counter(sizes)
        self._footprints = [footprints(order, sizes, remat) for order in orders]
        self._work = [
            _running(_step_seconds(cost, sizes, order, remat) / device.speed for cost in costs)
            for order, device in zip(orders, devices, strict=True)
        ]
        self._moved = [
            [sum(count * link.seconds(cost.output_bytes(size)) for size, count in counts.items()) for cost in costs]
            for link in links
        ]
        self._fixed = _running(cost.fixed_bytes for cost in costs)
        self._kept = {size: _running(cost.activation_bytes(size) for cost in costs) for size in set(sizes)}
        self._input = {size: [0.0, *(cost.output_bytes(size) for cost in costs)] for size in set(sizes)}
        largest = max(sizes)
        kept, tensors = [cost.activation_bytes(largest) for cost in costs], self._input[largest]
        self._received = tensors
        # [begin][n]: of the n + 1 segments from `begin`
        self._working = [working_bytes(kept[at:], tensors[at:]) for at in range(self.segments)]

    def seconds(self, begin: int, end: int, stage: int) -> float:
        """Returns the seconds of a step: transfers are hidden as long as the passes take longer."""
        into = self._moved[stage - 1][begin - 1] if stage else 0.0
        out = self._moved[stage][end - 1] if stage < self.stages - 1 else 0.0
        return max(self._work[stage][end] - self._work[stage][begin], into, out)

    def bytes(self, begin: int, end: int, stage: int) -> float:
        """Returns the bytes at the stage's peak."""
        most = max(
            sum(count * (self._kept[size][end] - self._kept[size][begin]) for size, count in moment.activations)
            + sum(count * self._input[size][begin] for size, count in moment.inputs)
            for moment in self._footprints[stage]
        )
        received = max(self._received[begin], self._received[end]) * self._ahead[stage]
        return self._fixed[end] - self._fixed[begin] + most + self._working[begin][end - begin - 1] + received

    def share_of_memory(self, begin: int, end: int, stage: int) -> float:
        """Returns the share of the device's memory that the stage needs; 0 without a limit."""
        return self.bytes(begin, end, stage) / self._limits[stage]

    def overflow(self, begin: int, end: int, stage: int) -> bool:
        """Returns True if the stage does not fit into its device's memory."""
        return self._limits[stage] < math.inf and self.bytes(begin, end, stage) > self._limits[stage]

    def least(self, measure: Measure, begin: int, end: int, stage: int) -> float:
        """Returns a lower bound of the measure, for this stage and for any that begins earlier."""
        if measure == self.seconds:
            return self._work[stage][end] - self._work[stage][begin]
        fixed = self._fixed[end] - self._fixed[begin]
        return fixed if measure == self.bytes else fixed / self._limits[stage]

    def partition_of(self, sizes: Sequence[int]) -> Partition:
        """Returns this cut with the time and memory of each stage."""
        ends = list(accumulate(sizes))
        groups = [(end - size, end, stage) for stage, (end, size) in enumerate(zip(ends, sizes, strict=True))]
        seconds = tuple(self.seconds(*group) for group in groups)
        return Partition(tuple(sizes), seconds, tuple(self.bytes(*group) for group in groups), max(seconds))


def _step_seconds(cost: SegmentCost, sizes: Sequence[int], order: Sequence[Action], remat: Remat) -> float:
    """Returns the seconds of one segment for all micro-batches."""
    again = Counter(sizes[micro] for micro in recomputed(remat, order))
    return sum(
        count * (cost.forward_s(size) + cost.backward_s(size)) + again[size] * cost.forward_s(size)
        for size, count in Counter(sizes).items()
    )


def _running(values: Iterable[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))
