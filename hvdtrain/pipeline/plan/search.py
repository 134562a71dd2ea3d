"""Whole plans, ranked: data parallel, pipeline, or both, with micro-batches, recomputation, accumulation; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import truediv

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.plan.costs import Device, Link, SegmentCost, all_reduce_seconds, ring_link, stage_costs, total
from hvdtrain.pipeline.plan.partition import Balance, Partition, in_words, partition
from hvdtrain.pipeline.plan.schedule import SCHEDULES, Remat, Schedule, micro_batch_sizes, usual_counts
from hvdtrain.pipeline.plan.simulate import Simulation, simulate

MOST_MICRO_BATCHES = 128
MOST_PASSES = 64  # of an update
MOST_SEGMENTS = 64  # that are looked at: more, and each is under a sixtieth of the time
ALIKE = 1.03  # times the fastest: no prediction tells such plans apart
# of gradients that are only ready when the backward pass ends: nothing hides the last bucket's all-reduce
LAST_BUCKET_BYTES = 2**20


@dataclass(frozen=True)
class Cluster:
    """Nodes that are alike."""

    devices: tuple[Device, ...]  # of one node, in the order of a pipeline's stages
    nodes: int = 1  # how many
    links: Link | tuple[Link, ...] = Link()  # within a node, from each device to the next; one stands for all
    network: Link = Link()  # from node to node; the devices of a node share it

    def between(self, stages: int) -> tuple[Link, ...]:
        """The links of a pipeline over the first devices."""
        return (self.links,) * (stages - 1) if isinstance(self.links, Link) else self.links[: stages - 1]

    def ring(self, replicas: int, per_node: int) -> Link:
        """Returns the link that limits an all-reduce over so many replicas."""
        within = [self.links] if isinstance(self.links, Link) else list(self.links)
        slowest = Link(
            max((one.latency_s for one in within), default=0.0),
            min((one.bytes_per_s for one in within), default=math.inf),
        )
        return ring_link(replicas, per_node, slowest, self.network)


@dataclass(frozen=True)
class ParallelPlan:
    """A way to train."""

    stages: int  # devices that each replica of the model is cut over
    replicas: int  # of the model, on other devices each: data parallel
    accumulate: int  # passes over a part of the batch for one update
    micro_batches: int  # of a pass
    schedule: Schedule
    remat: Remat
    batch: int  # samples of an update, all replicas together
    sizes: tuple[int, ...] = ()  # segments of each stage
    step_s: float = math.inf  # predicted, of an update
    bubble: float = 0.0  # the share of time that stages wait for each other
    all_reduce_s: float = 0.0  # of the update, what the backward pass does not hide
    # memory_bytes, limit_bytes: predicted peak of each stage's device, and what it has (infinite: no limit)
    memory_bytes: tuple[float, ...] = ()
    limit_bytes: tuple[float, ...] = ()
    reason: str = ""  # why it cannot be; "" if it can

    @property
    def predicted_samples_per_s(self) -> float:
        """Samples a second of all replicas together."""
        return self.batch / self.step_s

    @property
    def share(self) -> int:
        """Samples of the largest replica in an update."""
        return micro_batch_sizes(self.batch, self.replicas)[0]

    @property
    def part(self) -> int:
        """Samples of a pass of one replica."""
        return micro_batch_sizes(self.share, self.accumulate)[0]

    def __str__(self) -> str:
        if self.stages > 1:
            count, size = self.micro_batches, micro_batch_sizes(self.part, self.micro_batches)[0]
            what = f"{self.replicas} x " * (self.replicas > 1) + f"pipeline of {self.stages} stages, "
            what += f"{count} micro-batches of {size}" if count > 1 else f"batch {size} in one piece"
            what += f", {self.schedule}" + ", recomputing" * (self.remat != "never")
        else:
            what = f"data parallel on {self.replicas} devices" if self.replicas > 1 else "one device"
            what += f", batch {self.part}"
        return what + f", {self.accumulate} passes" * (self.accumulate > 1)


def plans(
    costs: Sequence[SegmentCost],
    *,
    batch: int,
    cluster: Cluster,
    stages: Sequence[int] | None = None,
    replicas: Sequence[int] | None = None,
    schedules: Sequence[Schedule] = SCHEDULES,
) -> list[ParallelPlan]:
    """Returns the best plan of each kind, the fastest first; last those that do not fit, with the reason.

    A kind is a number of stages and replicas, and how memory is saved: on a single device by passes over parts of the
    batch, in a pipeline by recomputation.

    Example:
        measured = hvdtrain.pipeline.profile(model, example, ["cuda:0", "cuda:1"])
        cluster = Cluster(measured.devices, links=measured.links)  # of hvdtrain.pipeline.plan.search
        print(hvdtrain.pipeline.plans(measured.costs, batch=256, cluster=cluster)[0])

    Args:
        costs: of the model's segments; `Device.speed` is against the device they were measured on.
        batch: samples of an update, all devices together.
        cluster: the devices, and the links between them.
        stages, replicas: numbers to try; default: all that make sense.
        schedules: of pipelines.

    Raises:
        ConfigError: no device, or no sample.
    """
    if batch < 1 or not cluster.devices or cluster.nodes < 1:
        received = f"batch={batch}, {len(cluster.devices)} devices, {cluster.nodes} nodes"
        raise ConfigError("a plan needs at least one sample, one device and one node", received)
    groups = list(coarsened(costs, MOST_SEGMENTS))
    search = _Search([_merged(group) for group in groups], [len(group) for group in groups], batch, cluster, schedules)
    counts = range(1, min(len(cluster.devices), len(groups)) + 1)
    found = [
        search.best(kind)
        for count in counts
        for copies in search.replicas(count)
        if count in (stages or counts) and copies in (replicas or (copies,))
        for kind in search.kinds(copies, count)
        if kind
    ]
    return sorted(found, key=lambda plan: (bool(plan.reason), plan.step_s, plan.stages * plan.replicas))


def coarsened(costs: Sequence[SegmentCost], most: int) -> Iterator[list[SegmentCost]]:
    """Yields groups of neighbours, each with its share of the time, at most `most`; every segment is in one."""
    if len(costs) <= most:
        yield from ([cost] for cost in costs)
        return
    seconds = [cost.forward_s(1) + cost.backward_s(1) for cost in costs]
    each, group, spent = sum(seconds) / most, [], 0.0
    for cost, its in zip(costs, seconds, strict=True):
        group.append(cost)
        spent += its
        if spent >= each:
            yield group
            group, spent = [], 0.0
    if group:
        yield group


def _merged(group: Sequence[SegmentCost]) -> SegmentCost:
    if len(group) == 1:
        return group[0]
    return SegmentCost(
        name=f"{group[0].name} .. {group[-1].name}",
        forward_s=total(cost.forward_s for cost in group),
        backward_s=total(cost.backward_s for cost in group),
        fixed_bytes=sum(cost.fixed_bytes for cost in group),
        gradient_bytes=sum(cost.gradient_bytes for cost in group),
        activation_bytes=total(cost.activation_bytes for cost in group),
        output_bytes=group[-1].output_bytes,
    )


@dataclass(frozen=True)
class _Search:
    """Tries what one kind of plan leaves open; `widths`: segments behind each cost."""

    costs: Sequence[SegmentCost]
    widths: Sequence[int]
    batch: int
    cluster: Cluster
    schedules: Sequence[Schedule]

    def replicas(self, stages: int) -> list[int]:
        """Returns the useful numbers of replicas of such a pipeline: one, a node full, all nodes full."""
        per_node = len(self.cluster.devices) // stages
        return [n for n in sorted({1, per_node, per_node * self.cluster.nodes}) if n <= self.batch]

    def kinds(self, replicas: int, stages: int) -> list[list[ParallelPlan]]:
        """Returns candidates of each kind: one stage takes its batch in passes, a pipeline in micro-batches."""
        plan = ParallelPlan(stages, replicas, 1, 1, "1f1b", "never", self.batch)
        if stages == 1:
            passes = [replace(plan, accumulate=n) for n in _counts(plan.share, MOST_PASSES)]
            return [passes[:1], passes[1:]]
        counts = _counts(plan.share, MOST_MICRO_BATCHES)
        # remat "all" takes longer than "except_last", and holds as much: where a backward follows directly on its
        # forward, the activations are there either way. With one micro-batch it is always so.
        useful: list[tuple[Remat, list[int]]] = [("never", counts), ("except_last", counts[1:])]
        return [
            [replace(plan, micro_batches=n, remat=remat, schedule=one) for n in some for one in self.schedules]
            for remat, some in useful
        ]

    def best(self, candidates: Sequence[ParallelPlan]) -> ParallelPlan:
        """Returns the fastest that fits (of those alike the smallest); else the nearest to fitting, with the reason."""
        possible = [plan for plan in map(self._tried, candidates) if not plan.reason]
        if possible:
            fast_enough = ALIKE * min(plan.step_s for plan in possible)
            alike = [plan for plan in possible if plan.step_s <= fast_enough]
            return min(alike, key=lambda plan: (max(plan.memory_bytes), plan.step_s))
        nearest = [self._least_memory(plan) for plan in candidates]
        return min(nearest, key=lambda plan: max(map(truediv, plan.memory_bytes, plan.limit_bytes)))

    def _tried(self, plan: ParallelPlan) -> ParallelPlan:
        """Returns the plan with its times and memory; or with the reason why it is impossible."""
        try:
            cut = self._cut(plan, self._devices(plan), "time")
        except ConfigError as error:
            return replace(plan, reason=error.received)
        step = simulate(
            stage_costs(self.costs, cut.sizes, self._devices(plan)),
            sizes=micro_batch_sizes(plan.part, plan.micro_batches), schedule=plan.schedule, remat=plan.remat,
            links=self.cluster.between(plan.stages),
        )  # fmt: skip
        exposed = self._exposed_all_reduce(plan, cut, step)
        return self._filled_in(
            plan, cut, step_s=plan.accumulate * step.step_s + exposed, bubble=step.bubble, all_reduce_s=exposed
        )

    def _cut(self, plan: ParallelPlan, devices: Sequence[Device], balance: Balance) -> Partition:
        return partition(
            self.costs, devices, batch=plan.part, micro_batches=plan.micro_batches, schedule=plan.schedule,
            remat=plan.remat, links=self.cluster.between(plan.stages), balance=balance,
        )  # fmt: skip

    def _devices(self, plan: ParallelPlan) -> list[Device]:
        """Returns the devices of a pipeline's stages: several replicas are cut alike, for the slowest of them."""
        devices, count = self.cluster.devices, plan.stages
        blocks = [devices[at : at + count] for at in range(0, len(devices) - count + 1, count)]
        if plan.replicas == 1:
            return list(max(blocks, key=lambda block: (min(one.speed for one in block), min(map(_memory, block)))))
        return [
            replace(min(same, key=_memory), speed=min(one.speed for one in same)) for same in zip(*blocks, strict=True)
        ]

    def _exposed_all_reduce(self, plan: ParallelPlan, cut: Partition, step: Simulation) -> float:
        """Returns the seconds from the end of the backward pass until the averaged gradients are there.

        A stage sends gradients during its last backward pass; the stages of a node share its network.
        """
        if plan.replicas == 1:
            return 0.0
        per_node = min(plan.replicas, len(self.cluster.devices) // plan.stages)
        ring = self.cluster.ring(plan.replicas, per_node)
        last = {span.stage: span for span in step.timeline}
        free_s = 0.0
        for stage, span in sorted(last.items(), key=lambda item: item[1].end_s):
            begin = sum(cut.sizes[:stage])
            size = sum(cost.gradient_bytes for cost in self.costs[begin : begin + cut.sizes[stage]])
            free_s = max(free_s, span.start_s) + all_reduce_seconds(size, plan.replicas, ring)
            tail_s = all_reduce_seconds(min(size, LAST_BUCKET_BYTES), plan.replicas, ring)
            free_s = max(free_s, span.end_s + tail_s)
        return free_s - step.step_s

    def _least_memory(self, plan: ParallelPlan) -> ParallelPlan:
        """Cuts so that the fullest device is as little overfull as possible."""
        devices = [replace(one, memory_bytes=None) for one in self._devices(plan)]
        cut = self._cut(plan, devices, "memory")
        plan = self._filled_in(plan, cut)
        pairs = zip(devices, plan.memory_bytes, plan.limit_bytes, strict=True)
        over = [f"{one.name} needs {in_words(need)} of {in_words(has)}" for one, need, has in pairs if need > has]
        return replace(plan, reason="; ".join(over) or "no cut fits all devices")

    def _filled_in(self, plan: ParallelPlan, cut: Partition, **numbers: float) -> ParallelPlan:
        ends = [sum(cut.sizes[:n]) for n in range(len(cut.sizes) + 1)]
        return replace(
            plan,
            sizes=tuple(sum(self.widths[a:b]) for a, b in zip(ends, ends[1:], strict=False)),
            memory_bytes=cut.stage_bytes,
            limit_bytes=tuple(map(_memory, self._devices(plan))),
            **numbers,  # type: ignore[arg-type]
        )


def _memory(device: Device) -> float:
    return math.inf if device.memory_bytes is None else device.memory_bytes


def _counts(samples: int, most: int) -> list[int]:
    """The usual ones, and the largest."""
    return sorted({*usual_counts(min(samples, most)), min(samples, most)})
