"""Plans from measured costs: for the devices of this process, or for devices that are only described."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.plan.costs import Curve, Device, SegmentCost, total
from hvdtrain.pipeline.plan.schedule import AHEAD
from hvdtrain.pipeline.plan.search import Cluster, ParallelPlan, plans

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.flop_counter import FlopCounterMode

# a model is cut for no smaller gain: predictions are no better than that
WORTH_A_STAGE = 0.05
MOST_DEVICES = 128  # of a node: an NVL72 rack has 72, and each more is planned for minutes

__all__ = ["Cluster", "ParallelPlan", "at_speed", "choose", "forward_flops", "plans"]


def choose(
    model: nn.Module, example: Any, *, devices: Sequence[str], batch: int, optimizer_copies: float = 1.0
) -> ParallelPlan:
    """Measures a model on the devices of this process, and returns the fastest plan for them that fits.

    One device alone is among the plans, as passes over parts of the batch where the whole does not fit. Of plans that
    are about as fast, the one with the fewest stages is returned. The model stays as it is; `batch`: samples of an
    update of this process; `optimizer_copies`: see `profile`. Raises `ConfigError` if nothing fits, or the model cannot
    be cut.
    """
    from hvdtrain.pipeline.tuning.profiles import profile

    everywhere = profile(model, example, list(devices), optimizer_copies=optimizer_copies)
    found: list[ParallelPlan] = []
    for stages in range(1, min(len(devices), len(everywhere.costs)) + 1):
        measured = everywhere
        if stages < len(devices) and any(str(device).startswith("cpu") for device in devices):
            # fewer stages have more cores each
            measured = profile(model, example, list(devices[:stages]), optimizer_copies=optimizer_copies)
        cluster = Cluster(measured.devices[:stages], links=measured.links[: stages - 1])
        found += plans(measured.costs, batch=batch, cluster=cluster, stages=(stages,), replicas=(1,))
    possible = [plan for plan in found if not plan.reason]
    if not possible:
        raise ConfigError(
            "some plan must fit into the memory of these devices",
            "\n".join(f"{plan}: {plan.reason}" for plan in found),
            "a smaller batch, or more devices",
        )
    fastest_s = min(plan.step_s for plan in possible)
    about_as_fast = [plan for plan in possible if plan.step_s <= fastest_s * (1 + WORTH_A_STAGE)]
    return min(about_as_fast, key=lambda plan: (plan.stages, plan.step_s))


def at_speed(costs: Sequence[SegmentCost], sample_s: float, samples: int, launch_s: float = 0.0) -> list[SegmentCost]:
    """Returns costs in the same shares, on a device where a sample takes `sample_s`; they were measured with
    micro-batches of `samples`. `launch_s`: to begin a forward pass of a segment, of any samples; a backward pass begins
    two."""
    measured_s = total(part for cost in costs for part in (cost.forward_s, cost.backward_s))(samples) / samples
    factor = sample_s / measured_s
    return [
        replace(
            cost,
            forward_s=cost.forward_s * factor + Curve.constant(launch_s),
            backward_s=cost.backward_s * factor + Curve.constant(2 * launch_s),
        )
        for cost in costs
    ]


def forward_flops(model: nn.Module, example: torch.Tensor) -> float:
    """Returns the operations of a forward pass, a multiplication and an addition as two; runs on no device."""
    return float(_counted(model, example).get_total_flops())


def _counted(model: nn.Module, example: torch.Tensor) -> FlopCounterMode:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    state = {name: tensor.to("meta") for name, tensor in model.state_dict(keep_vars=True).items()}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        torch.func.functional_call(model, state, torch.empty_like(example, device="meta"))
    return counter


def described(text: str, *, reserve_bytes: float = 0.0) -> tuple[Device, ...] | None:
    """Returns devices in words: "4x24GiB", or unequal ones as "2x24GiB,2x80GiB@2.5": 2.5 times as fast as the first.

    `reserve_bytes` of each are not for training. None for names of devices ("cuda:0,cuda:1"); raises `ConfigError` for
    neither.
    """
    import re

    parts = [part.strip() for part in text.split(",")]
    if all(re.fullmatch(r"cpu|cuda(:\d+)?", part) for part in parts):
        return None
    devices: list[Device] = []
    for part in parts:
        match = re.fullmatch(r"(?:(\d+)x)?(\d+(?:\.\d+)?)(GiB|GB|MiB|MB)(?:@(\d+(?:\.\d+)?))?", part, re.IGNORECASE)
        if match is None:
            raise ConfigError(
                "devices need a number and memory, or names", repr(text), "4x24GiB, 2x24GiB,2x80GiB@2.5 or cpu,cpu"
            )
        count, amount, unit, speed = match.groups()
        size = float(amount) * {"gib": 2**30, "gb": 1e9, "mib": 2**20, "mb": 1e6}[unit.lower()] - reserve_bytes
        if size <= 0 or count == "0" or (speed is not None and not float(speed)):
            received = f"{part}, of which {reserve_bytes / 2**30:g} GiB are not for training"
            raise ConfigError("a device needs memory and a speed above 0", received)
        if len(devices) + int(count or 1) > MOST_DEVICES:
            raise ConfigError(
                f"a node must have at most {MOST_DEVICES} devices", repr(text), "--nodes N: of such devices"
            )
        for _ in range(int(count or 1)):
            devices.append(Device(f"device {len(devices)}", float(speed or 1), size, ahead=AHEAD))
    return tuple(devices)


def as_json(plan: ParallelPlan) -> dict[str, Any]:
    """A plan as plain values; what is infinite becomes None."""
    finite = {
        name: None if isinstance(value, float) and math.isinf(value) else value for name, value in vars(plan).items()
    }
    limits = [None if math.isinf(limit) else limit for limit in plan.limit_bytes]
    return finite | {"plan": str(plan), "samples_per_s": plan.predicted_samples_per_s, "limit_bytes": limits}
