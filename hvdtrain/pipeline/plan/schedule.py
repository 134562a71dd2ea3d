"""Schedules as data: the actions of each stage of a pipeline, their order, and what the stage holds; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hvdtrain.core.errors import ConfigError

Schedule = Literal["gpipe", "1f1b"]
Remat = Literal["never", "all", "except_last"]
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")
REMATS: tuple[Remat, ...] = ("never", "all", "except_last")
AHEAD = 2  # passes of a stage that may be queued on a GPU: what is received for them is held as long

Kind = Literal["forward", "backward"]


@dataclass(frozen=True)
class Action:
    """A pass of a stage over a micro-batch."""

    kind: Kind
    micro: int


def micro_batch_sizes(batch: int, micro_batches: int) -> tuple[int, ...]:
    """Returns samples of each micro-batch (as `torch.tensor_split`); raises `ConfigError` for too few samples."""
    if micro_batches < 1:
        raise ConfigError("a batch must be cut into at least 1 micro-batch", f"micro_batches={micro_batches}")
    if batch < micro_batches:
        raise ConfigError(
            "every micro-batch needs a sample",
            f"a batch of {batch} in {micro_batches} micro-batches",
            f"a batch of at least {micro_batches}, or micro_batches={max(batch, 1)}",
        )
    small, larger = divmod(batch, micro_batches)
    return (small + 1,) * larger + (small,) * (micro_batches - larger)


def usual_counts(most: int) -> list[int]:
    """Returns 1, 2, 3, 4, 6, 8, 12, 16 and so on: between neighbours the step time differs by little."""
    return sorted(n for power in range(most.bit_length()) for n in {2**power, 3 * 2**power // 2} if n <= most)


def actions(schedule: Schedule, stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """Returns the actions of one stage (counted from 0), in order; raises `ConfigError` for an unknown schedule.

    "gpipe" (Huang et al., arXiv 1811.06965): all forwards, then all backwards in reverse order.

    "1f1b" (Narayanan et al., PipeDream-flush, arXiv 2006.09503): `stages - stage` forwards, then one backward and one
    forward in turn, so that a stage holds the activations of no more micro-batches than there are stages from it to
    the end. Both wait (s - 1) (f + b) for s stages, and passes of f and b seconds.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule= must be one of {', '.join(SCHEDULES)}", repr(schedule))
    m = micro_batches
    if schedule == "gpipe":
        ahead = [Action("forward", i) for i in range(m)]
        return (*ahead, *(Action("backward", i) for i in reversed(range(m))))
    ahead_of_it = min(m, stages - stage)
    order = [Action("forward", i) for i in range(ahead_of_it)]
    for i in range(m):
        order.append(Action("backward", i))
        if ahead_of_it + i < m:
            order.append(Action("forward", ahead_of_it + i))
    return tuple(order)


def stage_orders(schedule: Schedule, stages: int, micro_batches: int) -> list[tuple[Action, ...]]:
    """Returns the actions of each stage."""
    return [actions(schedule, stage, stages, micro_batches) for stage in range(stages)]


def recomputed(remat: Remat, order: Sequence[Action]) -> frozenset[int]:
    """Returns the micro-batches whose backward pass in a stage runs the forward pass again; raises `ConfigError`.

    "except_last" skips those whose backward follows directly on their forward: nothing would be gained.
    """
    if remat not in REMATS:
        raise ConfigError(f"remat= must be one of {', '.join(REMATS)}", repr(remat))
    if remat == "never":
        return frozenset()
    everyone = {action.micro for action in order}
    if remat == "except_last":
        directly = zip(order, order[1:], strict=False)
        everyone -= {a.micro for a, b in directly if a.kind == "forward" and b == Action("backward", a.micro)}
    return frozenset(everyone)


# ---- what a stage holds

Counts = tuple[tuple[int, int], ...]  # (samples of a micro-batch, how many of them), ascending


@dataclass(frozen=True)
class Footprint:
    """The micro-batches that a stage holds at one moment: of some all activations, of others the stage's input only
    (they are recomputed). Each as (samples of a micro-batch, how many)."""

    activations: Counts = ()
    inputs: Counts = ()


def footprints(order: Sequence[Action], sizes: Sequence[int], remat: Remat = "never") -> tuple[Footprint, ...]:
    """Returns the moments at which a stage holds most; one is its peak, whatever activations and inputs weigh.

    Activations are held from the forward to the end of the backward; of a recomputed micro-batch the input is, and
    during its backward the activations also.
    """
    again = recomputed(remat, order)
    whole, inputs = Counter[int](), Counter[int]()
    moments: set[Footprint] = set()
    for action in order:
        size = sizes[action.micro]
        if action.kind == "forward":
            (inputs if action.micro in again else whole)[size] += 1
        elif action.micro in again:
            whole[size] += 1
        moments.add(Footprint(_counts(whole), _counts(inputs)))
        if action.kind == "backward":
            whole[size] -= 1
            if action.micro in again:
                inputs[size] -= 1
    return tuple(one for one in moments if not any(_covers(other, one) for other in moments if other != one))


def _counts(counter: Counter[int]) -> Counts:
    return tuple(sorted((+counter).items()))


def _covers(larger: Footprint, smaller: Footprint) -> bool:
    """Returns True if `larger` holds at least what `smaller` does."""
    pairs = ((larger.activations, smaller.activations), (larger.inputs, smaller.inputs))
    return all(dict(big).get(size, 0) >= count for big, small in pairs for size, count in small)
