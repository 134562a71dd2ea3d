"""Tensors of all ranks, for what a script computes beside its training: metrics, predictions, a flag of rank 0's."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hvdtrain.comm.elastic import repeated
from hvdtrain.core.errors import ConfigError
from hvdtrain.torch.engines.buffers import broadcast_
from hvdtrain.torch.engines.engine import engine_of
from hvdtrain.world.world import World, given_or_current

_OPS = ("mean", "sum", "min", "max")


@repeated
def reduce(tensor: Tensor, op: Literal["mean", "sum", "min", "max"] = "mean", *, world: World | None = None) -> Tensor:
    """Returns the mean (sum, smallest, largest) of a tensor over ranks, element by element; collective.

    It is for metrics, and has no gradient: `Optimizer.backward` averages a loss over ranks already.

    Args:
        tensor: of one shape and dtype on every rank; detached, or under `no_grad`. Integers have a whole mean, rounded
            down.
        op: what is made of the ranks' values.
        world: the ranks; by default those of `hvdtrain.init`.

    Returns:
        A new tensor on the same device, the same on every rank.

    Raises:
        ConfigError: another op, or a tensor that a gradient would have to go through.
        ReplicaError: on every rank; shapes or dtypes differ.
    """
    if op not in _OPS:
        raise ConfigError(f"op must be one of {', '.join(_OPS)}", f"op={op!r}")
    world = _entered("reduce", tensor, world)
    if world.size == 1:
        return tensor.detach().clone()
    with world.in_step(f"hvt.reduce(op={op!r})", f"{tuple(tensor.shape)} {tensor.dtype}"):
        if op in ("mean", "sum"):
            total = engine_of(world).sum_(tensor.detach().clone(memory_format=torch.contiguous_format))
            if op == "sum":
                return total
            return total / world.size if total.is_floating_point() or total.is_complex() else total // world.size
    every = torch.stack(_of_all(tensor, world))
    return every.amin(0) if op == "min" else every.amax(0)


@repeated
def gather(tensor: Tensor, *, world: World | None = None) -> Tensor:
    """Returns the ranks' tensors, joined along their first dimension in rank order; collective.

    Args:
        tensor: [n, ...], with an n of each rank's own; detached, or under `no_grad`.
        world: the ranks; by default those of `hvdtrain.init`.

    Raises:
        ConfigError: a tensor of no dimension, or one that a gradient would have to go through.
    """
    if not tensor.dim():
        raise ConfigError("tensors are joined along their first dimension", "one of no dimension", "tensor.reshape(1)")
    world = _entered("gather", tensor, world)
    return torch.cat(_of_all(tensor, world))


@repeated
def broadcast(tensor: Tensor, root: int = 0, *, world: World | None = None) -> Tensor:
    """Returns root's tensor, on this rank's device; collective. It has root's shape only if all ranks' have it.

    Raises:
        ConfigError: a tensor that a gradient would have to go through.
        ReplicaError: on every rank; shapes or dtypes differ.
    """
    world = _entered("broadcast", tensor, world)
    found = tensor.detach().clone(memory_format=torch.contiguous_format)
    if world.size > 1:
        with world.in_step("hvt.broadcast", f"{root} {tuple(tensor.shape)} {tensor.dtype}"):
            broadcast_([found], world, root)
    return found


def _entered(what: str, tensor: Tensor, world: World | None) -> World:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ConfigError(
            f"hvt.{what} has no gradient: it is for metrics",
            f"a tensor of shape {tuple(tensor.shape)} that needs one",
            f"in a metric hvt.{what}(x.detach()); a loss is given to optimizer.backward as this rank's own: it is"
            " averaged over ranks there",
        )
    return given_or_current(world, "torch")


def _of_all(tensor: Tensor, world: World) -> list[Tensor]:
    return [one.to(tensor.device) for one in world.gather(tensor.detach().cpu())]
