"""Which samples a rank sees: the same global order at any world size, from any point in an epoch.

The epoch is one permutation of all samples, a pure function of seed and epoch. A global step takes the next
`size * per_rank_batch` samples of it, and rank r the r-th contiguous piece. So N ranks x B see the samples of
one process x N·B step by step, and a job that stops after `consumed` samples goes on at any other size
without repeating or skipping one.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hvdtrain.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's part of one global step.

    Attributes:
        indices: int64 [n], this rank's samples; n is `per_rank_batch`, or less (even 0) in a tail.
        global_count: samples of all ranks in this step; gradients are weighted by n / global_count.
    """

    indices: np.ndarray
    global_count: int


@dataclass(frozen=True)
class Plan:
    """How an epoch of `samples` samples is dealt to `size` ranks.

    Attributes:
        samples: samples in the data set.
        size: ranks.
        per_rank_batch: samples a rank takes in a full step.
        seed: of the order; the same on every rank.
        shuffle: False keeps the data set's order.
        tail: what happens to the last samples when they do not fill a global step: "weighted" deals them out
            as evenly as possible (ranks may get one less, or none; weight gradients by live samples), "drop"
            leaves them out.
    """

    samples: int
    size: int
    per_rank_batch: int
    seed: int = 0
    shuffle: bool = True
    tail: Literal["weighted", "drop"] = "weighted"

    def __post_init__(self) -> None:
        for name, least in (("samples", 0), ("size", 1), ("per_rank_batch", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
                raise ConfigError(f"{name} must be a whole number >= {least}", f"{name}={value!r}")
        if self.tail not in ("weighted", "drop"):
            raise ConfigError('tail must be "weighted" or "drop"', f"tail={self.tail!r}")
        if self.tail == "drop" and self.steps() == 0 and self.samples:
            raise ConfigError(
                'tail="drop" needs at least one full global step in an epoch',
                f"{self.samples} samples, {self.size} x {self.per_rank_batch} = {self.global_batch} a step",
                'make the batch smaller, use fewer ranks, or tail="weighted"',
            )

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in a full step."""
        return self.size * self.per_rank_batch

    def steps(self, consumed: int = 0) -> int:
        """Return how many steps are left in an epoch of which `consumed` samples are done."""
        left = self.samples - self._checked(consumed)
        return left // self.global_batch if self.tail == "drop" else -(-left // self.global_batch)

    def order(self, epoch: int) -> np.ndarray:
        """Return the epoch's order: int64 [samples], a permutation; equal on every rank and at every size.

        Sorts by raw Philox words, which numpy guarantees never to change (NEP 19); its `permutation` may
        change between versions, and a resumed epoch would then repeat and skip samples.
        """
        import numpy as np

        if epoch < 0:
            raise ConfigError("epoch must be >= 0", f"epoch={epoch}")
        if not self.shuffle:
            return np.arange(self.samples, dtype=np.int64)
        words = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64)).random_raw(self.samples)
        return np.argsort(words, kind="stable").astype(np.int64, copy=False)

    def step_slices(self, epoch: int, consumed: int = 0, *, rank: int) -> list[Share]:
        """Return rank's share of every step that is left in the epoch.

        Args:
            epoch: counted from 0.
            consumed: samples of all ranks already done in this epoch.
            rank: whose shares.

        Raises:
            ConfigError: `rank` or `consumed` out of range.
        """
        if not 0 <= rank < self.size:
            raise ConfigError(f"rank must be below {self.size}", f"rank={rank}")
        order = self.order(epoch)
        shares = []
        for step in range(self.steps(consumed)):
            start = consumed + step * self.global_batch
            count = min(self.global_batch, self.samples - start)
            mine = contiguous(count, rank, self.size)
            shares.append(Share(order[start + mine.start : start + mine.stop], count))
        return shares

    def _checked(self, consumed: int) -> int:
        if not 0 <= consumed <= self.samples:
            raise ConfigError(
                f"samples done in this epoch must be within 0..{self.samples}", f"consumed={consumed}",
                "the checkpoint belongs to another data set: give the same data, or another run directory",
            )  # fmt: skip
        return consumed


def tail_pieces(samples: int, full: int, pieces: int) -> int:
    """Return into how many pieces a tail is cut so that none is larger than those of a full batch.

    Args:
        samples: of the tail, at least 1.
        full: samples of a full batch.
        pieces: of a full batch.
    """
    return -(-samples // -(-full // pieces))


def contiguous(samples: int, rank: int, size: int) -> slice:
    """Return rank's contiguous piece of `samples`: each sample in exactly one, their sizes differ by at most 1."""
    if samples < 0 or not 0 <= rank < size:
        raise ConfigError("need samples >= 0 and 0 <= rank < size", f"samples={samples}, rank={rank}, size={size}")
    each, extra = divmod(samples, size)
    start = rank * each + min(rank, extra)
    return slice(start, start + each + (rank < extra))
