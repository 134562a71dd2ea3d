"""What a schedule takes: measured stage and transfer times make a step time; pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.plan.costs import Link, StageCost
from hvdtrain.pipeline.plan.schedule import Action, Kind, Remat, Schedule, recomputed, stage_orders


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
    busy_s: tuple[float, ...]  # of each stage, while it was in a pass
    timeline: tuple[Span, ...]  # every pass, by its end

    @property
    def bubble(self) -> float:
        """The share of its time that a stage is idle, on average."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.step_s)


def simulate(
    stages: Sequence[StageCost],
    *,
    sizes: Sequence[int],
    schedule: Schedule = "1f1b",
    remat: Remat = "never",
    links: Link | Sequence[Link] = Link(),  # noqa: B008 - frozen
) -> Simulation:
    """Simulates a training step, every stage taking its actions in the schedule's order as soon as it can.

    A transfer runs beside the passes, one at a time for each direction of a link (`links`: from each stage to the
    next; one stands for all). A recomputed micro-batch's backward takes its forward time more.

    Raises `ConfigError` for too many or too few links.
    """
    between = links_between(links, len(stages))
    orders = stage_orders(schedule, len(stages), len(sizes))
    seconds = [_pass_seconds(*pair, sizes, remat) for pair in zip(stages, orders, strict=True)]
    todo = [deque(order) for order in orders]
    arrived_s = {(0, Action("forward", micro)): 0.0 for micro in range(len(sizes))}  # what each pass needs
    # when a stage, and each direction of a link, is free again
    free_s, link_free_s = [0.0] * len(stages), defaultdict[tuple[int, int], float](float)
    timeline: list[Span] = []
    while any(todo):
        known = len(timeline)
        for stage, waiting in enumerate(todo):
            while waiting and (stage, waiting[0]) in arrived_s:
                action = waiting.popleft()
                start_s = max(free_s[stage], arrived_s[stage, action])
                end_s = free_s[stage] = start_s + seconds[stage][action]
                timeline.append(Span(stage, action.kind, action.micro, start_s, end_s))
                target = stage + 1 if action.kind == "forward" else stage - 1
                if target == len(stages):
                    arrived_s[stage, Action("backward", action.micro)] = end_s
                elif target >= 0:
                    first = min(stage, target)
                    move_s = between[first].seconds(stages[first].output_bytes(sizes[action.micro]))
                    leaves_s = max(link_free_s[stage, target], end_s)
                    arrived_s[target, action] = link_free_s[stage, target] = leaves_s + move_s
        assert len(timeline) > known, "the schedule waits for itself"
    busy = [0.0] * len(stages)
    for span in timeline:
        busy[span.stage] += span.end_s - span.start_s
    return Simulation(max(free_s), tuple(busy), tuple(sorted(timeline, key=lambda span: span.end_s)))


def links_between(links: Link | Sequence[Link], stages: int) -> tuple[Link, ...]:
    """Returns a link between each two neighbouring stages; or raises `ConfigError`."""
    if isinstance(links, Link):
        links = (links,) * (stages - 1)
    if len(links) != stages - 1:
        raise ConfigError("every two neighbouring stages need a link", f"{len(links)} link(s), {stages} stages")
    return tuple(links)


def _pass_seconds(stage: StageCost, order: Sequence[Action], sizes: Sequence[int], remat: Remat) -> dict[Action, float]:
    """Returns the seconds of each action of a stage."""
    again = recomputed(remat, order)
    forward = {size: stage.forward_s(size) for size in set(sizes)}
    backward = {size: stage.backward_s(size) for size in set(sizes)}

    def seconds(action: Action) -> float:
        size = sizes[action.micro]
        if action.kind == "forward":
            return forward[size]
        return backward[size] + (forward[size] if action.micro in again else 0.0)

    return {action: seconds(action) for action in order}
