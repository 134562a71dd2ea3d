"""What a schedule takes: discrete events turn measured stage and transfer times into a step time; pure."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.plan.costs import Link, Pool, StageCost, device_peak_bytes
from hvdtrain.pipeline.plan.schedule import WEIGHT_SHARE, Action, Kind, Remat, Schedule, actions, of_stage, recomputed

NOW = 1e-12  # of the time so far: what ends within it ends now
SELDOM = 0.05  # of the work: passes are together too seldom to tell what they do to each other


class Span(NamedTuple):
    """A pass of one stage, in seconds since the step began."""

    stage: int
    kind: Kind
    micro: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulation:
    """A simulated step."""

    step_s: float  # until the last backward pass has ended
    busy_s: tuple[float, ...]  # of each device, while it was in a pass (slowed down by others of its pool or not)
    peak_bytes: tuple[float, ...]  # of each device
    timeline: tuple[Span, ...]  # every pass, by its end
    efficiency: float  # the stages' work, each alone on its device, over devices x step: 1 means that none ever waits

    @property
    def bubble(self) -> float:
        """The share of its time that a device is idle, on average."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.step_s)


def simulate(
    stages: Sequence[StageCost],
    *,
    sizes: Sequence[int],
    schedule: Schedule = "1f1b",
    remat: Remat = "never",
    links: Link | Sequence[Link] = Link(),  # noqa: B008 - frozen
    pools: Mapping[str, Pool] | None = None,
    overlap: bool = True,
    chunks: int = 1,
) -> Simulation:
    """Simulates a training step, every device taking its actions in the schedule's order as soon as it can.

    A transfer runs beside the passes, one at a time for each direction of a link (`links`: from each device to the
    next; one stands for all). A recomputed micro-batch's backward takes its forward time more. Stages whose devices
    share a pool slow each other down while they run together, or wait for each other where it has fewer slots. Of
    stages that come at the same moment, one that has just ended a pass is first.

    `stages` are in the order of the model; number i is on device i % (number of devices). Without `overlap` one thing
    happens at a time, as in a model that is merely split. Raises `ConfigError` for too many or too few links.
    """
    devices = len(stages) // chunks
    between = links_between(links, devices, chunks)
    orders = [actions(schedule, device, devices, len(sizes), chunks) for device in range(devices)]
    run = _Run(stages, sizes, orders, remat, between, pools or {}, overlap)
    run.to_the_end()
    busy = [0.0] * devices
    for span in run.timeline:
        busy[span.stage % devices] += span.end_s - span.start_s
    return Simulation(
        step_s=run.now_s,
        busy_s=tuple(busy),
        peak_bytes=tuple(device_peak_bytes(stages[at::devices], orders[at], sizes, remat) for at in range(devices)),
        timeline=tuple(run.timeline),
        efficiency=run.work_s / (devices * run.now_s) if run.now_s else 1.0,
    )


def pool_speeds(seen: Sequence[tuple[float, float, float]], most: int) -> tuple[float, ...]:
    """Returns how fast passes are that run beside others, up to `most` (`Pool.speeds`), from a step that was timed.

    With n at once each is taken to have the speed 1 / (1 + c (n - 1)): c is 0 where they do not disturb each other, 1
    where together they do the work of one. The c is the one for which all the time that was spent makes all the work.
    `seen`: (start, end, seconds that it takes alone) of every pass.
    """
    work_s = sum(alone_s for _, _, alone_s in seen)
    spent_s: dict[int, float] = {}
    edges = sorted([(start, 1) for start, _, _ in seen] + [(end, -1) for _, end, _ in seen])
    running = 0
    for (now, change), (then, _) in zip(edges, edges[1:], strict=False):
        running += change
        spent_s[running] = spent_s.get(running, 0.0) + running * (then - now)

    def done_s(c: float) -> float:
        return sum(seconds / (1 + c * (running - 1)) for running, seconds in spent_s.items() if running)

    low, high = 0.0, 2.0
    beside_others_s = sum(seconds for running, seconds in spent_s.items() if running > 1)
    if done_s(low) <= work_s or beside_others_s < SELDOM * work_s:
        high = low
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if done_s(middle) > work_s else (low, middle)
    return tuple(1 / (1 + high * (running - 1)) for running in range(1, most + 1))


def links_between(links: Link | Sequence[Link], devices: int, chunks: int = 1) -> tuple[Link, ...]:
    """Returns a link between neighbouring stages, the slowest from the last device back; or raises `ConfigError`."""
    if isinstance(links, Link):
        links = (links,) * (devices - 1)
    if len(links) != devices - 1:
        raise ConfigError("every two neighbouring stages need a link", f"{len(links)} link(s), {devices} stages")
    back = Link(
        max((one.latency_s for one in links), default=0.0), min((one.bytes_per_s for one in links), default=math.inf)
    )
    return tuple(([*links, back] * chunks)[:-1])


@dataclass
class _Pass:
    """A pass that runs: `left_s` at full speed."""

    action: Action
    left_s: float
    start_s: float


class _Run:
    """The state of a step while it is simulated."""

    def __init__(
        self,
        stages: Sequence[StageCost],
        sizes: Sequence[int],
        orders: Sequence[tuple[Action, ...]],
        remat: Remat,
        links: Sequence[Link],
        pools: Mapping[str, Pool],
        overlap: bool,
    ) -> None:
        self.now_s, self.work_s, self._devices = 0.0, 0.0, len(orders)
        self.timeline: list[Span] = []
        self._todo = [deque(order) for order in orders]
        self._seconds = [
            _pass_seconds(stage, of_stage(orders[index % len(orders)], index // len(orders)), sizes, remat)
            for index, stage in enumerate(stages)
        ]
        self._moves = [
            [link.seconds(stage.output_bytes(size)) for size in sizes]
            for stage, link in zip(stages[:-1], links, strict=True)
        ]
        self._pool_of = [stage.device.pool for stage in stages[: len(orders)]]
        self._pools = pools
        self._overlap = overlap
        self._arrived = {(0, Action("forward", micro)) for micro in range(len(sizes))}
        self._running: dict[int, _Pass] = {}
        self._waiting: dict[str, deque[int]] = {}  # by pool: stages that wait for a slot
        self._just_ended: list[int] = []
        # devices (from, to) -> what is on its way there, with the seconds it needs: the first one moves
        self._lanes: dict[tuple[int, int], deque[tuple[Action, float]]] = {}

    def to_the_end(self) -> None:
        """Advances the time until no work remains."""
        self._start()
        while self._running or self._lanes:
            self._advance()
            self._start()
        assert not any(self._todo), "the schedule waits for itself"

    def _start(self) -> None:
        """Starts the next action on every idle device that has what it needs, if the pool has a free slot."""
        for stage in dict.fromkeys([*self._just_ended, *range(len(self._todo))]):
            todo = self._todo[stage]
            if stage in self._running or not todo or (stage, todo[0]) not in self._arrived:
                continue
            waiting = self._waiting.setdefault(self._pool_of[stage], deque())
            if stage not in waiting:
                waiting.append(stage)
        self._just_ended = []
        for name, waiting in self._waiting.items():
            while waiting and self._may_start(name):
                stage = waiting.popleft()
                action = self._todo[stage].popleft()
                work_s = self._seconds[action.chunk * self._devices + stage][action]
                self.work_s += work_s
                self._running[stage] = _Pass(action, work_s, self.now_s)

    def _may_start(self, name: str) -> bool:
        if not self._overlap:
            return not (self._running or self._lanes)
        slots = self._pools[name].slots if name in self._pools else 0
        return not slots or sum(self._pool_of[stage] == name for stage in self._running) < slots

    def _advance(self) -> None:
        """Advances to the next moment at which something ends."""
        together = Counter(self._pool_of[stage] for stage in self._running)
        pools = {stage: self._pools.get(self._pool_of[stage]) for stage in self._running}
        speeds = {stage: pool.speed(together[self._pool_of[stage]]) if pool else 1.0 for stage, pool in pools.items()}
        ends = {stage: one.left_s / speeds[stage] for stage, one in self._running.items()}
        dt = min([*ends.values(), *(lane[0][1] for lane in self._lanes.values())])
        self.now_s += dt
        soon = dt + NOW * self.now_s
        self._move(dt, soon)  # first: what is handed over now has not moved yet
        for stage, one in list(self._running.items()):
            one.left_s -= dt * speeds[stage]
            if ends[stage] <= soon:
                self._finish(stage, self._running.pop(stage))

    def _move(self, dt: float, soon: float) -> None:
        """The first tensor of each lane arrives, or comes closer."""
        for (source, target), lane in list(self._lanes.items()):
            action, left_s = lane.popleft()
            if left_s > soon:
                lane.appendleft((action, left_s - dt))
                continue
            self._arrived.add((target, action))
            if not lane:
                del self._lanes[source, target]

    def _finish(self, device: int, one: _Pass) -> None:
        action, stage = one.action, one.action.chunk * self._devices + device
        self._just_ended.append(device)
        self.timeline.append(Span(stage, action.kind, action.micro, one.start_s, self.now_s))
        if action.kind == "forward" and stage < len(self._seconds) - 1:
            self._send(stage, stage + 1, action, self._moves[stage][action.micro])
        elif action.kind == "forward":
            self._arrived.add((device, replace(action, kind="backward")))
        elif action.kind == "backward":
            self._arrived.add((device, replace(action, kind="weight")))
            if stage:
                self._send(stage, stage - 1, action, self._moves[stage - 1][action.micro])

    def _send(self, source: int, target: int, action: Action, seconds: float) -> None:
        """Sends an action's tensor from one stage to another."""
        lane = source % self._devices, target % self._devices
        action = replace(action, chunk=target // self._devices)
        if not seconds or lane[0] == lane[1]:
            self._arrived.add((lane[1], action))
        else:
            self._lanes.setdefault(lane, deque()).append((action, seconds))


def _pass_seconds(stage: StageCost, order: Sequence[Action], sizes: Sequence[int], remat: Remat) -> dict[Action, float]:
    """Returns the seconds of each action of a stage, alone on its device."""
    again = recomputed(remat, order)
    share = WEIGHT_SHARE if any(action.kind == "weight" for action in order) else 0.0
    forward = {size: stage.forward_s(size) for size in set(sizes)}
    backward = {size: stage.backward_s(size) for size in set(sizes)}

    def seconds(action: Action) -> float:
        size = sizes[action.micro]
        if action.kind == "forward":
            return forward[size]
        if action.kind == "weight":
            return backward[size] * share
        return backward[size] * (1 - share) + (forward[size] if action.micro in again else 0.0)

    return {action: seconds(action) for action in order}
