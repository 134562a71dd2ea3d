"""Adds gradients over ranks where a loop is not ours: after a backward pass, with proof of the first sum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import hvdtrain.torch as hvt
from hvdtrain import ReplicaError, World

_PROJECTED = 1e-4, 1e-9  # by how much a projection of summed gradients may be off: float32, float64


class GradientSums:
    """Sums of gradients over the ranks of `world`; with `verify`, the first one is proven.

    Raises:
        ReplicaError: on every rank, if the first sum is not that of the ranks' gradients.
    """

    def __init__(self, world: World, *, verify: bool = True) -> None:
        self._world, self._verifies = world, verify

    def of(self, parameters: Sequence[nn.Parameter], own: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns each parameter's sum over ranks of `own`, or None where no rank has a gradient; collective."""
        if self._world.size == 1 or not parameters:
            return list(own)
        flags = torch.tensor([float(gradient is not None) for gradient in own], device=parameters[0].device)
        used = [bool(number) for number in hvt.reduce(flags, "sum", world=self._world)]
        summed: list[Tensor | None] = [None] * len(parameters)
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            places = [at for at, parameter in enumerate(parameters) if used[at] and parameter.dtype == dtype]
            if not places:
                continue
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
