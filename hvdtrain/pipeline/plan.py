"""Schedules as data: what each stage of a pipeline does, in which order; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hvdtrain.errors import ConfigError

Schedule = Literal["gpipe", "1f1b"]
Remat = Literal["never", "all", "except_last"]
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")
REMATS: tuple[Remat, ...] = ("never", "all", "except_last")


@dataclass(frozen=True)
class Action:
    """One pass of one stage over one micro-batch."""

    kind: Literal["forward", "backward"]
    micro: int


def micro_batch_sizes(batch: int, micro_batches: int) -> tuple[int, ...]:
    """Samples of each micro-batch: they differ by at most one, the larger ones first (as `torch.tensor_split`).

    Raises:
        ConfigError: fewer samples than micro-batches, or no micro-batch.
    """
    if micro_batches < 1:
        raise ConfigError("a batch is cut into at least 1 micro-batch", f"micro_batches={micro_batches}")
    if batch < micro_batches:
        raise ConfigError(
            "every micro-batch needs a sample",
            f"a batch of {batch} in {micro_batches} micro-batches",
            f"a batch of at least {micro_batches}, or micro_batches={max(batch, 1)}",
        )
    small, larger = divmod(batch, micro_batches)
    return (small + 1,) * larger + (small,) * (micro_batches - larger)


def actions(schedule: Schedule, stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """What one stage does, in order.

    "gpipe" (Huang et al., arXiv 1811.06965): all forwards, then all backwards in reverse order. "1f1b" (Narayanan et
    al., PipeDream-flush, arXiv 2006.09503): ``stages - stage`` forwards, then one backward and one forward in turn, so
    that a stage holds the activations of no more micro-batches than there are stages from it to the end.

    Args:
        stage: counted from 0.
    """
    m = micro_batches
    if schedule == "gpipe":
        return tuple(Action("forward", i) for i in range(m)) + tuple(Action("backward", i) for i in reversed(range(m)))
    ahead = min(m, stages - stage)
    order = [Action("forward", i) for i in range(ahead)]
    for i in range(m):
        order.append(Action("backward", i))
        if ahead + i < m:
            order.append(Action("forward", ahead + i))
    return tuple(order)


def recomputed(remat: Remat, order: Sequence[Action]) -> frozenset[int]:
    """The micro-batches whose backward runs the forward pass once more.

    "except_last" leaves out those whose backward follows directly on their forward: nothing would be gained.
    """
    if remat == "never":
        return frozenset()
    everyone = {action.micro for action in order}
    if remat == "except_last":
        everyone -= {b.micro for a, b in zip(order, order[1:], strict=False) if a.micro == b.micro}
    return frozenset(everyone)
