"""A loss that is a sum of means, each with a divisor of its own, as detection and multi-task losses are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hvdtrain.core.errors import ConfigError
from hvdtrain.torch.checks.tally import weight_of
from hvdtrain.torch.update.gradients import check_loss


class Term(NamedTuple):
    """One mean of this rank's batch.

    Attributes:
        mean: a scalar.
        divisor: what it divides by.
    """

    mean: Tensor
    divisor: float


def terms_of(given: Sequence[Any], weight: object, more: bool) -> list[Term]:
    """Returns the terms that `backward` was given.

    Raises:
        ConfigError: no pairs of a mean and its divisor; or `weight=`, or `more=True` beside them.
    """
    if weight is not None or more:
        raise ConfigError(
            "each mean of a list has its own divisor, and all are given at once",
            "weight=" if weight is not None else "more=True",
            "optimizer.backward([(mean, divisor), (mean, divisor)])",
        )
    terms = []
    for pair in given:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ConfigError(
                "a sum of means is a list of (mean, divisor)",
                f"a {type(pair).__name__} in it",
                "optimizer.backward([(class_loss, len(y)), (box_loss, matched)])",
            )
        mean, divisor = pair
        number = float(weight_of(divisor, torch.device("cpu")))
        if not number and isinstance(mean, Tensor) and mean.numel() == 1 and abs(float(mean.detach())) > 0:
            raise ConfigError(
                "a mean of nothing is 0",
                f"a mean of {float(mean.detach()):g} with divisor 0",
                "a sum over all that is divided by how many match (clamped, where none do) is one of the whole batch:"
                " optimizer.forward_backward(x, y, loss_fn, whole=True)",
            )
        check_loss(mean, untracked=not number)
        terms.append(Term(mean, number))
    if not terms:
        raise ConfigError("backward() takes the loss", "an empty list", "optimizer.backward([(mean, divisor), ...])")
    return terms


class Terms:
    """Of one update: what was counted, and the gradients of its batches but the last, by term."""

    def __init__(self) -> None:
        self.counts: list[float] = []
        self._sums: list[Tensor] = []
        self._aside: list[dict[nn.Parameter, Tensor]] = []

    def add(self, terms: Sequence[Term], counted: Sequence[int]) -> None:
        """Counts a batch's means, those at these places."""
        if self.counts and len(self.counts) != len(terms):
            raise ConfigError(
                "all batches of an update have the same means",
                f"a list of {len(terms)} after one of {len(self.counts)}",
                "give those that do not count with divisor 0",
            )
        self._grow(len(terms), terms[0].mean)
        for at in counted:
            self.counts[at] += terms[at].divisor
            self._sums[at] = self._sums[at] + terms[at].mean.detach().double() * terms[at].divisor

    def put_aside(self, place: int, parameters: Sequence[nn.Parameter]) -> None:
        """Takes `p.grad` for the sum of a term."""
        while len(self._aside) <= place:
            self._aside.append({})
        for parameter in parameters:
            if parameter.grad is not None:
                held = self._aside[place].get(parameter)
                self._aside[place][parameter] = parameter.grad if held is None else held.add_(parameter.grad)
                parameter.grad = None

    def restore(self, totals: Sequence[float], parameters: Sequence[nn.Parameter]) -> None:
        """Gives `p.grad` the gradient of the update's earlier batches, for totals of all ranks."""
        for total, aside in zip(totals, self._aside, strict=False):
            for parameter in parameters:
                if parameter in aside:
                    part = aside[parameter].mul_(1 / total)
                    parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)
        self._aside = []

    def mean(self, totals: Sequence[float]) -> Tensor:
        """Returns this rank's part of the loss."""
        parts = [its / total for its, total in zip(self._sums, totals, strict=True) if total]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)

    def _grow(self, terms: int, like: Tensor) -> None:
        if not self.counts:
            self.counts = [0.0] * terms
            self._sums = [torch.zeros((), dtype=torch.float64, device=like.device)] * terms
