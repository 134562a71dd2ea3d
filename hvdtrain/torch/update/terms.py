"""A loss that is a sum of means, each with a divisor of its own, as detection and multi-task losses are."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hvdtrain.core.errors import ConfigError
from hvdtrain.torch.losses.loss_proof import LossProof
from hvdtrain.torch.losses.tally import Tally, differ, uneven, weight_of
from hvdtrain.torch.update.gradients import check_loss
from hvdtrain.torch.update.whole import is_whole


class MeanTerm(NamedTuple):
    """A mean of this rank's batch."""

    mean: Tensor  # a scalar
    divisor: float  # what it divides by
    given: object  # the divisor, as the caller gave it
    factor: float  # of the mean in the loss


def terms_of(given: Sequence[Any], weight: object, more: bool) -> list[MeanTerm]:
    """Returns the terms that `backward` was given; raises `ConfigError` for no pairs of a mean and its divisor, and
    for `weight=` or `more=True` beside them."""
    if weight is not None or more:
        raise ConfigError(
            "weight= and more= are not supported with a list: each mean has its own divisor",
            "weight=" if weight is not None else "more=True",
            "optimizer.backward([(mean, divisor), (mean, divisor)])",
        )
    terms = []
    for pair in given:
        its = pair if isinstance(pair, (tuple, list)) else [pair]
        if len(its) not in (2, 3) or not _is_number(*its[2:]):
            raise ConfigError(
                "a list of means must contain (mean, divisor), or (mean, divisor, factor) with a number as factor",
                f"in the list: {', '.join(type(one).__name__ for one in its)}",
                "optimizer.backward([(class_loss, len(y)), (box_loss, matched, beta)]);\n"
                "multiply the mean itself by a factor that is trained",
            )
        mean, divisor, factor = (*its, 1.0)[:3]
        number = float(weight_of(divisor, torch.device("cpu")))
        check_loss(mean, untracked=not number)
        if is_whole(mean):
            raise ConfigError(
                "a mean of a list must be this rank's own: the ranks' means are added up",
                "a loss on what hvt.whole() returned, with a divisor",
                "optimizer.backward(loss) for the loss of the whole batch;\nwith other means: add up all of them, each"
                " computed from what hvt.whole(...) returns",
                shared=True,
            )
        terms.append(MeanTerm(mean, number, divisor, float(factor)))
    if not terms:
        raise ConfigError("backward() needs a loss", "an empty list", "optimizer.backward([(mean, divisor), ...])")
    return terms


def _is_number(factor: Any = 1.0) -> bool:
    array = hasattr(factor, "shape") and math.prod(factor.shape) == 1
    return isinstance(factor, numbers.Real) or (array and not getattr(factor, "requires_grad", False))


class Terms:
    """The terms of one update: what was counted, and by term the gradients of its batches except the last."""

    def __init__(self, terms: int) -> None:
        self.counts = [0.0] * terms
        self.tallies = [Tally() for _ in range(terms)]  # whether each mean divides by what it is given with
        for its in self.tallies:
            its.given = True
        self._factors = [0.0] * terms  # those of each batch, as one number
        self._batches = 0
        self._sums = [torch.zeros((), dtype=torch.float64)] * terms
        self._aside: list[dict[nn.Parameter, Tensor]] = []

    def add(self, terms: Sequence[MeanTerm], counted: Sequence[int]) -> None:
        """Counts a batch's means, those at these places."""
        for at in counted:
            self.counts[at] += terms[at].divisor
            self._sums[at] = (
                self._sums[at].to(terms[at].mean.device) + terms[at].mean.detach().double() * terms[at].divisor
            )

    def begin(self, terms: Sequence[MeanTerm]) -> None:
        """Notes the factors of a batch; raises `ConfigError` for another number of means than before."""
        if len(self.counts) != len(terms):
            raise ConfigError(
                "all batches of an update must have the same means",
                f"a list of {len(terms)} after one of {len(self.counts)}",
                "give means that do not count with divisor 0",
            )
        self._batches += 1
        for at, term in enumerate(terms):
            self._factors[at] += term.factor * math.sqrt(self._batches)

    def sent(self) -> list[float]:
        tallies = zip(self.tallies, self._factors, strict=True)
        parts = [(its.divisors, its.squares, its.problems, factor, factor**2) for its, factor in tallies]
        return [*self.counts, *(float(one) for its in parts for one in its)]

    def compared(self, sums: list[float], ranks: int, proof: LossProof, tally: Tally) -> list[float]:
        """Returns what the means count on all ranks, of what `sent` gave; has means with other divisors refused."""
        totals, rest = sums[: len(self.counts)], sums[len(self.counts) :]
        wrong = []
        for at, (total, its) in enumerate(zip(totals, self.tallies, strict=True)):
            divisors, squares, problems, factors, factor_squares = rest[5 * at : 5 * at + 5]
            apart = "; its factor differs between ranks" if differ(factors, factor_squares, ranks) else ""
            if problems or apart or uneven(total, divisors, squares):
                proof.refuse_list(tally)
                wrong.append(f"mean {at + 1} of the list: {its.text()}{apart}")
        if wrong:
            tally.text = lambda: "; ".join(wrong)
        return totals

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
                if parameter in aside and total:
                    part = aside[parameter].mul_(1 / total)
                    parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)
        self._aside = []

    def mean(self, totals: Sequence[float]) -> Tensor:
        parts = [its / total for its, total in zip(self._sums, totals, strict=True) if total]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)
