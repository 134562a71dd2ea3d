"""Adds gradients over ranks where a loop is not ours: after a backward pass, with proof of the first sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import hvdtrain.torch as hvt
from hvdtrain import ConfigError, ReplicaError, World
from hvdtrain.torch.engines import unprepared
from hvdtrain.watch.preemption import is_preempted

STATISTICS = ("running_mean", "running_var")
_PROJECTED = 1e-4, 1e-9  # by how much a projection of summed gradients may be off: float32, float64


class GradientSums:
    """Sums of gradients over the ranks of `world`; with `verify`, the first one is proven.

    Raises:
        ReplicaError: on every rank, if the first sum is not that of the ranks' gradients.
    """

    def __init__(self, world: World, *, verify: bool = True) -> None:
        self._world, self._verifies = world, verify
        self.preempted = False  # a rank got SIGTERM: known to all ranks since the same sum
        self.unsummed: set[nn.Parameter] = set()  # their gradients are not the same on all ranks yet

    def backward(
        self, parameters: Sequence[nn.Parameter], differentiate: Callable[[], Any], *,
        counts: bool = True, apart: Collection[nn.Parameter] = (),
    ) -> Any:  # fmt: skip
        """Adds the sum over ranks of what `differentiate` finds to `p.grad`; collective. Returns what that returns.

        Until it is summed, a gradient is kept times the number of ranks: the mean over ranks of `p.grad` is then right
        for its summed part, which is the same on all ranks, and for the rest.

        Args:
            parameters: those that can get a gradient.
            differentiate: the backward pass.
            counts: False drops what it finds, on a rank without samples.
            apart: parameters whose sum waits for a later backward pass.
        """
        earlier = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        found = differentiate()
        for parameter, before in zip(parameters, earlier, strict=True):
            fresh, parameter.grad = parameter.grad, before
            if fresh is not None:
                self.unsummed.add(parameter)
                fresh = fresh.detach() * self._world.size if counts else torch.zeros_like(fresh)
                parameter.grad = fresh if before is None else before + fresh
        summed = [parameter for parameter in parameters if parameter not in apart]
        own = [None if (its := parameter.grad) is None else its / self._world.size for parameter in summed]
        waits = [parameter in self.unsummed and parameter.grad is not None for parameter in summed]
        for parameter, total in zip(summed, self.of(summed, own, waits), strict=True):
            if total is not None:
                parameter.grad = total
        self.unsummed.difference_update(summed)
        return found

    def of(
        self, parameters: Sequence[nn.Parameter], own: Sequence[Tensor | None], counted: Sequence[bool] | None = None
    ) -> list[Tensor | None]:
        """Returns each parameter's sum over ranks of `own`, or None where no rank has a gradient; collective.

        With `counted` a parameter has a sum if it is counted on any rank.
        """
        if self._world.size == 1 or not parameters:
            self.preempted = self.preempted or (self._world.size == 1 and is_preempted())
            return list(own)
        unprepared.stop()  # gradients are averaged here
        counted = [gradient is not None for gradient in own] if counted is None else counted
        words = torch.tensor([float(is_preempted()), *map(float, counted)], device=parameters[0].device)
        preempted, *used = [bool(number) for number in hvt.reduce(words, "sum", world=self._world)]
        self.preempted = self.preempted or preempted
        summed: list[Tensor | None] = [None] * len(parameters)
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            places = [at for at, parameter in enumerate(parameters) if used[at] and parameter.dtype == dtype]
            if not places:
                continue
            if any(its is not None and its.is_sparse for its in own):
                raise ConfigError(
                    "gradients must be dense to be summed over ranks",
                    "a sparse gradient",
                    "nn.Embedding(..., sparse=False)",
                )
            given = [torch.zeros_like(parameters[at]) if (its := own[at]) is None else its for at in places]
            flat = torch.cat([gradient.detach().reshape(-1) for gradient in given])
            total = hvt.reduce(flat, "sum", world=self._world)
            self._prove(flat, total)
            for at, piece in zip(places, total.split([gradient.numel() for gradient in given]), strict=True):
                summed[at] = piece.view_as(parameters[at])
        return summed

    def _prove(self, own: Tensor, total: Tensor) -> None:
        """Compares a random projection of the first summed gradients with the sum of the ranks' projections."""
        if not self._verifies:
            return
        made = torch.Generator().manual_seed(1)
        direction = torch.randn(own.shape, generator=made, dtype=torch.float64).to(own.device)
        reports = self._world.gather((float(own.double() @ direction), float(own.double().abs() @ direction.abs())))
        expected, scale = (sum(its[at] for its in reports) for at in (0, 1))
        if not math.isfinite(scale):
            return  # a gradient scaler begins too high, and skips such updates
        self._verifies = False
        found = float(total.double() @ direction)
        if not abs(found - expected) <= _PROJECTED[own.dtype == torch.float64] * scale:
            raise ReplicaError("gradients must be summed over ranks", f"{found:g}, not {expected:g}", shared=True)
        if self._world.is_main:
            print(f"hvdtrain: averaging proven: {self._world.size} ranks, gradients summed after backward", flush=True)


def share_weights(module: nn.Module, world: World) -> None:
    """Gives every rank the parameters and buffers of rank 0; collective."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()) if world.size > 1 else ():
            tensor.copy_(hvt.broadcast(tensor, world=world))


def share_statistics(module: nn.Module, world: World) -> None:
    """Gives every rank the mean of running statistics; collective."""
    buffers = [buffer for name, buffer in module.named_buffers() if name.endswith(STATISTICS) and world.size > 1]
    if buffers:
        mean = hvt.reduce(torch.cat([buffer.reshape(-1) for buffer in buffers]), "mean", world=world)
        for buffer, part in zip(buffers, mean.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))


def share_buffers(module: nn.Module, world: World) -> None:
    """Gives every rank the mean of running statistics, and rank 0's other buffers; collective."""
    share_statistics(module, world)
    with torch.no_grad():
        for name, buffer in module.named_buffers() if world.size > 1 else ():
            if not name.endswith(STATISTICS):
                buffer.copy_(hvt.broadcast(buffer, world=world))
