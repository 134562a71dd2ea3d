"""Schedules as data: the actions of each stage of a pipeline, their order, and what the stage holds; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hvdtrain.core.errors import ConfigError

Schedule = Literal["gpipe", "1f1b", "zb-h1", "interleaved"]
Remat = Literal["never", "all", "except_last"]
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "zb-h1", "interleaved")
REMATS: tuple[Remat, ...] = ("never", "all", "except_last")
AHEAD = 2  # passes of a stage that may be queued on a GPU: what is received for them is held as long

Kind = Literal["forward", "backward", "weight"]
WEIGHT_SHARE = 0.5  # of a backward pass: the gradients of the weights, where they are taken apart (of a matrix product)


@dataclass(frozen=True)
class Action:
    """A pass over a micro-batch of stage number `chunk` of a device. Where a schedule has "weight" passes, its
    "backward" passes give gradients only to what came in."""

    kind: Kind
    micro: int
    chunk: int = 0


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


def actions(schedule: Schedule, device: int, devices: int, micro_batches: int, chunks: int = 1) -> tuple[Action, ...]:
    """Returns the actions of one device, in order.

    "gpipe" (Huang et al., arXiv 1811.06965): all forwards, then all backwards in reverse order.

    "1f1b" (Narayanan et al., PipeDream-flush, arXiv 2006.09503): `devices - device` forwards, then one backward and one
    forward in turn, so that a device holds the activations of no more micro-batches than there are stages from it to
    the end. Both wait (s - 1) (f + b) for s devices, and passes of f and b seconds.

    "zb-h1" (Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv 2401.10241): as "1f1b", but a backward pass
    computes only the gradients of its inputs. Those of the weights follow `device` micro-batches later and fill the
    waits at the end. Waits (s - 1) (f + b_input - b_weight); holds as much as the first device of "1f1b".

    "interleaved" (Narayanan et al., SC 2021, arXiv 2104.04473): stage i of `devices * chunks` is on device i % devices,
    and 1F1B cycles through them. The waits shrink with the stages, to (s - 1) (f + b) / chunks; transfers and
    activations grow.

    Args:
        device: counted from 0.
        chunks: stages on each device.

    Raises:
        ConfigError: no such schedule, or one that has one stage a device.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule= must be one of {', '.join(SCHEDULES)}", repr(schedule))
    m = micro_batches
    if chunks > 1 and schedule in ("1f1b", "zb-h1"):
        raise ConfigError(
            f"{schedule} needs one stage per device", f"{chunks} stages a device", 'schedule="interleaved" or "gpipe"'
        )
    if schedule == "gpipe":
        ahead = [Action("forward", i, chunk) for chunk in range(chunks) for i in range(m)]
        return (*ahead, *(Action("backward", one.micro, one.chunk) for one in reversed(ahead)))
    if schedule == "interleaved" and chunks > 1:
        return _interleaved(device, devices, m, chunks)
    ahead_of_it = min(m, devices - device)
    order = [Action("forward", i) for i in range(ahead_of_it)]
    split = schedule == "zb-h1"
    for i in range(m):
        order.append(Action("backward", i))
        if split and i >= device:
            order.append(Action("weight", i - device))
        if ahead_of_it + i < m:
            order.append(Action("forward", ahead_of_it + i))
    return (*order, *(Action("weight", i) for i in range(max(0, m - device), m) if split))


def _interleaved(device: int, devices: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
    """Sends micro-batches in groups of about as many as there are devices, each through all chunks."""
    groups, at = [], 0
    for size in micro_batch_sizes(micro_batches, max(1, micro_batches // devices)):
        groups.append(range(at, at + size))
        at += size
    forwards = [Action("forward", i, chunk) for group in groups for chunk in range(chunks) for i in group]
    backwards = [Action("backward", i, chunk) for group in groups for chunk in reversed(range(chunks)) for i in group]
    ahead = min(len(forwards), (chunks - 1) * len(groups[0]) + 2 * (devices - device - 1))
    order = forwards[:ahead]
    for position, backward in enumerate(backwards):
        order += forwards[ahead + position : ahead + position + 1]
        order.append(backward)
    return tuple(order)


def of_stage(order: Sequence[Action], chunk: int) -> tuple[Action, ...]:
    """Returns a device's actions for one of its stages."""
    return tuple(action for action in order if action.chunk == chunk)


def stage_orders(schedule: Schedule, devices: int, micro_batches: int, chunks: int = 1) -> list[tuple[Action, ...]]:
    """Returns the actions of each stage, on whatever device it is."""
    rows = [actions(schedule, device, devices, micro_batches, chunks) for device in range(devices)]
    return [of_stage(rows[stage % devices], stage // devices) for stage in range(devices * chunks)]


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
        after = [(b.micro, b.kind) for b in order[1:]]
        directly = zip(order, after, strict=False)
        everyone -= {a.micro for a, b in directly if a.kind == "forward" and b == (a.micro, "backward")}
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

    Activations are held from the forward to the end of the backward, or of what comes after it for the weights; of a
    recomputed micro-batch the input is, and from its backward on the activations too.
    """
    again = recomputed(remat, order)
    whole, inputs = Counter[int](), Counter[int]()
    moments: set[Footprint] = set()
    end = "weight" if any(action.kind == "weight" for action in order) else "backward"
    for action in order:
        size = sizes[action.micro]
        if action.kind == "forward":
            (inputs if action.micro in again else whole)[size] += 1
        elif action.kind == "backward" and action.micro in again:
            whole[size] += 1
        moments.add(Footprint(_counts(whole), _counts(inputs)))
        if action.kind == end:
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
