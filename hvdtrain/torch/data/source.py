"""What a loader reads from, and the random numbers of samples by their place in the epoch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from hvdtrain.core.sharding import Plan, Step, random_words
from hvdtrain.world.same_data import Digest

# (batch [n, ...], uniforms float64 [n, augment.draws]) -> batch; for example `hvdtrain.torch.crop_flip`
Augment = Callable[[Tensor, Tensor], Tensor]


class Fetched(NamedTuple):
    """The result of one step. `batch` has tensors nested as the data set nests them. If no sample remains, it has two
    real ones that do not count (one, if there is only one): normalisation over one would fail. `kept` are the step's
    samples in the batch, if some could not be read or there are none (None: all). `bad` are the names of the
    unreadable ones, each with the reason."""

    batch: Any
    kept: list[int] | None
    bad: list[tuple[str, str]]


class Source(Protocol):
    """A source of batches."""

    @property
    def samples(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def worth_a_thread(self) -> bool:
        """Returns True if reading ahead helps on a GPU: there is a copy to hide, or a process to wait for."""

    def read(self, steps: Sequence[Step]) -> Generator[Fetched, None, None]:
        """Yields what the steps ask for, in order; closing it ends what it holds."""

    def digest(self) -> Digest:
        """Returns a digest that differs if this rank's data differs from another's."""

    def close(self) -> None: ...


# One stream of random words a purpose: the last word of Philox's counter, which the order of samples leaves at 0.
AUGMENT_STREAM, SEED_STREAM = 1, 2


def words(plan: Plan, epoch: int, first: int, samples: int, each: int, *, stream: int) -> np.ndarray:
    """Returns `each` random words for samples in a row by their position in the epoch, uint64 [samples, each].

    They are the same at any world size, batch and resume: each sample has whole blocks of four words for itself, so
    that a rank starts anywhere without drawing all before. Data of another size, and another stream, share none.
    """
    blocks = -(-each // 4)
    raw = random_words(plan.samples, plan.seed, epoch, samples * blocks * 4, block=first * blocks, stream=stream)
    return raw.reshape(samples, blocks * 4)[:, :each]


def uniforms(plan: Plan, epoch: int, first: int, samples: int, each: int) -> np.ndarray:
    """Returns float64 [samples, each] in [0, 1), for augmentation, by the samples' positions (see `words`)."""
    drawn = words(plan, epoch, first, samples, each, stream=AUGMENT_STREAM)
    return (drawn >> np.uint64(11)) * 2.0**-53  # 53 bits fill a double's mantissa
