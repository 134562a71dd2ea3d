"""The learning rate that `lr=` sets: of which optimizer, for how many samples, and nowhere else."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.lr import LR
from hvdtrain.keras.backends.session import KerasSession, leaves_of


def rate_of(optimizer: Any) -> float:
    """Returns an optimizer's current learning rate, of a variable or of a schedule."""
    rate = leaves_of(optimizer)[0].learning_rate  # of several (MultiOptimizer) the first one's
    return float(keras.ops.convert_to_numpy(rate.value if hasattr(rate, "value") else rate))


def global_batch(session: KerasSession, optimizer: Any) -> int:
    """Returns the samples of one update: ranks x per-rank batch x accumulation, as far as an epoch has so many."""
    passes = max((leaf.gradient_accumulation_steps or 1) for leaf in leaves_of(optimizer))
    full = (session.per_rank_batch or 0) * session.world.size * passes
    return min(full, session.samples or full)


def check_rate(optimizer: Any, lr: LR, global_batch: int) -> None:
    """Refuses a learning rate that would be set in two places.

    Raises:
        ConfigError: the optimizer has a schedule of its own, or a rate that was scaled already.
    """
    leaves = leaves_of(optimizer)
    if len(leaves) > 1:
        raise ConfigError(
            "lr= sets one learning rate",
            f"{type(optimizer).__name__} with {len(leaves)} optimizers, each with a rate of its own",
            "leave lr= out and give each a learning_rate (or schedule) for the global batch",
        )
    own = leaves[0]._learning_rate
    if not isinstance(own, keras.Variable):
        raise ConfigError(
            "the learning rate is set in one place: lr=, or the optimizer's own schedule",
            f"lr={lr} and {type(own).__name__} in {leaves[0].name!r}",
            f"make the optimizer with learning_rate={lr.base}, or leave lr= out",
        )
    lr.check_optimizer(rate_of(optimizer), global_batch)
