"""Is what a batch gives put together of what its pieces give? One judge for every framework: numbers in, a verdict out.

Each framework runs a batch and pieces of it in its own way, and takes losses, and gradients by outputs or by weights.
What they are then compared by is here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# What rounding may come to, of the largest value: in float64, in float32, in fewer bits.
_BOUNDS = {
    "same operations": (1e-9, 1e-4, 5e-2),  # the same shapes: sums over samples alone are rounded otherwise
    "same outputs": (1e-9, 1e-5, 2e-2),  # a loss of some outputs, and of each
    "model": (1e-9, 1e-3, 5e-2),  # gradients of a model that runs again, on other shapes
    "outputs": (1e-8, 1e-3, 0.1),  # the model's outputs, likewise
    "loss": (1e-7, 2e-5, 3e-2),  # the loss alone, of such a model
}
_FITS = 10.0  # times that: how near a batch comes to its pieces where only their shares were wrong
_EQUAL = 1e-4  # of shares


def bound(compared: str, precisions: Iterable[str]) -> float:
    """Returns how far apart whole and pieces may be by rounding, as a part of the largest value; of the types of
    numbers that were computed in (`precisions`) the coarsest counts."""
    found = set(precisions) - {"float64"}
    fine, single, coarse = _BOUNDS[compared]
    return coarse if found - {"float32"} else single if found else fine


@dataclass(frozen=True)
class LossGradients:
    """The loss and gradients of a batch, or of a piece of it. Gradients are arrays of any framework, by the name of the
    tensor that they belong to. A gradient that a piece lacks counts as 0."""

    loss: float  # its mean loss
    gradients: Mapping[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Gaps:
    """The differences between a batch and the weighted sum of its pieces."""

    loss: float  # the difference of the losses
    gradients: Mapping[Any, float]  # the largest difference of each gradient, by name
    largest: float  # of the batch's gradients, the largest value

    @property
    def gradient(self) -> float:
        """The largest difference of all; infinite where one is not a number."""
        return max(self.gradients.values(), default=0.0)


Kind = Literal["holds", "is a sum", "is weighed otherwise", "samples meet"]


def compared(whole: LossGradients, parts: Sequence[LossGradients], shares: Sequence[float]) -> Gaps:
    """Returns the differences between a batch and its pieces, whose shares in it come to 1, or to 0 where nothing
    counts. What a piece of share 0 gives need not be a number."""
    pairs = [(part, share) for part, share in zip(parts, shares, strict=True) if share]
    loss = whole.loss - sum(share * part.loss for part, share in pairs) if pairs else math.nan
    names = dict.fromkeys([*whole.gradients, *(name for part, _ in pairs for name in part.gradients)])
    gradients = {}
    for name in names:
        left = whole.gradients.get(name)
        for part, share in pairs:
            if name in part.gradients:
                its = share * part.gradients[name]
                left = -its if left is None else left - its
        gradients[name] = _largest(left)
    return Gaps(abs(loss), gradients, max(map(_largest, whole.gradients.values()), default=0.0))


def judge(gaps: Gaps, *, gradient: float, loss: float, best: Gaps | None = None, shares: Sequence[float] = ()) -> Kind:
    """Returns what a batch is to its pieces, by the gaps with the shares that the pieces were given, and how far
    apart gradients and losses may be by rounding (`bound`, times what it is a part of); `best` are the gaps with the
    `shares` that fit best, where these are known."""
    if gaps.loss <= loss and gaps.gradient <= gradient:
        return "holds"
    if best is not None and best.gradient > _FITS * gradient:
        return "samples meet"
    if shares and all(abs(share - 1) < _EQUAL for share in shares):
        return "is a sum"
    return "is weighed otherwise"


def _largest(array: Any) -> float:
    """The largest magnitude in an array of any framework; infinite if a value is not a number."""
    found = float(abs(array).max()) if math.prod(array.shape) else 0.0
    return math.inf if math.isnan(found) else found
