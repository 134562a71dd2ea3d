"""Proves, on the user's own model and engine, that gradients are averaged and replicas are equal.

Sends known gradients, different on every rank, through the path of a training step (the engine's forward, backward and
reduction), and compares the result with their weighted mean. Changes no state.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor, nn

from hvdtrain.comm.elastic import repeated
from hvdtrain.core.errors import ConfigError, ReplicaError
from hvdtrain.core.proof import Proof
from hvdtrain.torch.engines import replicas
from hvdtrain.torch.engines.base import Pass
from hvdtrain.torch.engines.shell import LARGEST, Probe, pattern, trainable
from hvdtrain.torch.update.model import Model
from hvdtrain.torch.update.optimizer import Optimizer
from hvdtrain.torch.update.session import Session
from hvdtrain.world.world import World

# of the mean's largest value; the patterns are exact in every type, their products with weights are rounded once
_TOLERANCE = {None: 1e-5, "fp16": 4e-3, "bf16": 4e-2}


def verify(model: nn.Module, optimizer: torch.optim.Optimizer, world: World | None = None) -> Proof:
    """Proves that this model's gradients are averaged over ranks and its replicas are equal; collective.

    Example:
        print(hvt.verify(model, optimizer))

    Args:
        model, optimizer: as `prepare` returned them, between two updates.
        world: checked to be the world that they were prepared with.

    Raises:
        ConfigError: not prepared, not prepared together, or in the middle of an update.
        ReplicaError: on every rank, if gradients are not averaged or replicas differ.
    """
    prepared = isinstance(model, Model) and isinstance(optimizer, Optimizer)
    if not prepared or vars(model)["session"] is not vars(optimizer)["session"]:
        raise ConfigError(
            "verify() needs a model and an optimizer that prepare() returned together",
            f"{type(model).__name__}, {type(optimizer).__name__}",
            "model, optimizer = hvdtrain.torch.prepare(model, optimizer, ...)",
        )
    session: Session = vars(model)["session"]
    if world is not None and world.comm is not session.world.comm:
        raise ConfigError("verify() must run on the ranks of the model", "another world")
    return prove(session)


@repeated
def prove(session: Session) -> Proof:
    """Runs the proof; collective. Raises `ConfigError` in the middle of an update, and `ReplicaError` on every rank."""
    started, world = time.perf_counter(), session.world
    parameters = trainable(session.module)
    if world.size == 1:
        return Proof(1, len(parameters))
    session.gradients.refuse_in_update()
    for parameter in parameters:  # of the last update
        parameter.grad = None
    replicas.check_equal(session.module, world, "before the first update")
    total = sum(range(1, world.size + 1))
    # rank r has the gradient (r + 1) x pattern and the weight (r + 1) / total
    mean = sum(rank * rank for rank in range(1, world.size + 1)) / total
    weight = (world.rank + 1) / total
    extras = torch.tensor([weight, world.rank + 1.0], dtype=torch.float64, device=session.engine.device)
    with session.gradients.differentiating():
        loss = session.engine_model.call(Probe(world.rank + 1.0))
        session.engine_model.backward(loss * weight, Pass(reduce=True, extras=extras))
        session.engine_model.finish()
    largest = mean * LARGEST
    off = _largest_gap(parameters, mean) / largest
    own = _largest_gap(parameters, (world.rank + 1.0) * weight) / largest
    for parameter in parameters:
        parameter.grad = None
    reports = world.gather((off, own, extras.tolist()))
    tolerance = _TOLERANCE[session.options.compression]
    if not all(gap <= tolerance for gap, _, _ in reports):  # NaN is not <=
        raise _not_averaged([gap for gap, _, _ in reports], [gap for _, gap, _ in reports], tolerance, _hooked(session))
    if any(not math.isclose(sums[0], 1.0) or sums[1] != total for _, _, sums in reports):
        raise ReplicaError(
            "losses and samples must be summed with the gradients",
            "\n".join(f"rank {rank}: {sums} instead of [1, {total}]" for rank, (_, _, sums) in enumerate(reports)),
            shared=True,
        )
    sha256 = replicas.fingerprint(session.module)
    world.agree("the model (SHA-256)", sha256)
    return Proof(world.size, len(parameters), max(gap for gap, _, _ in reports), sha256, time.perf_counter() - started)


def _largest_gap(parameters: list[nn.Parameter], factor: float) -> float:
    """max |gradient - factor x pattern|; infinite without a gradient."""
    gaps = []
    for index, parameter in enumerate(parameters):
        if parameter.grad is None:
            return math.inf
        if parameter.numel():
            gaps.append((_wide(parameter.grad) - _wide(pattern(index, parameter)) * factor).abs().max())
    return float(torch.stack([gap.to(gaps[0].device) for gap in gaps]).max()) if gaps else 0.0


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _hooked(session: Session) -> list[str]:
    """Returns the names of parameters whose gradients hooks of the user's own may change."""
    after = "_post_accumulate_grad_hooks"
    return [
        name
        for name, parameter in session.module.named_parameters()
        for hook in [*(parameter._backward_hooks or {}).values(), *(getattr(parameter, after) or {}).values()]
        if not str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("hvdtrain.")
    ]


def _not_averaged(off: list[float], own: list[float], tolerance: float, hooked: list[str]) -> ReplicaError:
    if hooked:
        return ReplicaError(
            "hooks cannot change a parameter's gradient: they run before gradients are averaged",
            f"a hook on {', '.join(dict.fromkeys(hooked))} changes it",
            "change gradients between optimizer.backward(loss) and optimizer.step(),\nwhen p.grad is that of the"
            " global batch: layer.weight.grad.mul_(mask)",
            shared=True,
        )
    local = all(gap <= tolerance for gap in own)
    return ReplicaError(
        "a gradient must be the weighted mean of all ranks' gradients",
        "\n".join(
            f"rank {rank}: off by {gap:.3g} of the mean (tolerance {tolerance:g})" for rank, gap in enumerate(off)
        )
        + ("\nevery rank kept its own gradient" if local else ""),
        "leave the hooks of the engine alone; report this with the output of `hvdtrain doctor`",
        shared=True,
    )
