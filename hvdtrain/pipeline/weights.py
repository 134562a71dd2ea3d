"""How much each micro-batch counts: by what its mean loss divides by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hvdtrain.core.errors import ConfigError

Weight = float | Tensor | Callable[[Any], float | Tensor] | None
_EXAMPLES = (
    "weight=lambda y: (y != -100).sum() for ignore_index, weight=lambda y: class_weights[y].sum() for class weights"
)


def shares(weight: Weight, targets: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """The part of the batch's gradient that each micro-batch makes; they sum to 1, or are all 0.

    Args:
        weight: as in `Pipeline.step`.
        targets: of each micro-batch.
        sizes: samples of each micro-batch.

    Raises:
        ConfigError: a weight that is no number >= 0, or a number for several micro-batches.
    """
    if weight is None:
        weights: list[float] = list(sizes)
    elif callable(weight):
        weights = [_number(weight(target)) for target in targets]
    else:
        weights = [_number(weight)]
        if len(sizes) > 1:
            raise ConfigError(
                "a batch that is cut into micro-batches needs the weight of each of them",
                f"weight={weights[0]:g} for {len(sizes)} micro-batches",
                f"a function of the targets: {_EXAMPLES}",
            )
    total = sum(weights)
    return [one / total if one else 0.0 for one in weights]


def _number(value: Any) -> float:
    single = value.numel() == 1 if isinstance(value, Tensor) else not isinstance(value, str)
    try:
        number = float(value) if single else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if math.isfinite(number) and number >= 0:
        return number
    came = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) and not single else repr(value)
    raise ConfigError("a weight is a number >= 0: what the mean loss divides by", came, _EXAMPLES)
