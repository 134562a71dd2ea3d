"""What each step of an epoch serves to this rank; pure numbers, known in advance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from hvdtrain.core.sharding import Plan

# One stream of random words a purpose: the last word of Philox's counter, which the order of samples leaves at 0.
AUGMENT_STREAM, SEED_STREAM = 1, 2


@dataclass(frozen=True, eq=False)
class Step:
    """This rank's part of one global step.

    Attributes:
        plan: what deals the samples.
        epoch: counted from 0.
        begin: samples of all ranks that were done in the epoch when the loop over it began.
        number: of the step in that loop, counted from 0.
        first: where in the epoch's global order this rank's samples begin.
        samples: of this rank; 0 in a tail that is smaller than the number of ranks.
        global_samples: samples of all ranks in this step, as planned.
        consumed: samples of all ranks that are done in the epoch after it.
    """

    plan: Plan
    epoch: int
    begin: int
    number: int
    first: int
    samples: int
    global_samples: int
    consumed: int

    def indices(self) -> np.ndarray:
        """Returns int64 [samples], this rank's samples; computed with each call."""
        return self.plan.order(self.epoch, self.first, self.first + self.samples)


class Steps(Sequence[Step]):
    """Rank's steps for the rest of an epoch; each is made when it is read.

    Raises:
        ConfigError: `begin` out of range.
    """

    def __init__(self, plan: Plan, epoch: int, begin: int, *, rank: int) -> None:
        self._plan, self._epoch, self._begin, self._rank = plan, epoch, begin, rank
        self._count = plan.steps(begin)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> list[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | list[Step]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._count))]
        number = range(self._count)[index]
        plan, begin = self._plan, self._begin
        mine, samples = plan.span(number, begin, self._rank)
        return Step(
            plan=plan,
            epoch=self._epoch,
            begin=begin,
            number=number,
            first=mine.start,
            samples=mine.stop - mine.start,
            global_samples=samples,
            consumed=begin + number * plan.global_batch + samples,
        )


def words(plan: Plan, epoch: int, first: int, samples: int, each: int, *, stream: int) -> np.ndarray:
    """Returns random words for samples by their position in the epoch: the same at any world size, batch and resume.

    Philox is a function of key and counter (Salmon et al. 2011); numpy promises its words never to change (NEP 19).
    Each sample has whole blocks of four words for itself, so that a rank starts anywhere without drawing all before.

    Args:
        plan: its seed is the key; data of another size gets unrelated words.
        epoch: counted from 0.
        first: position of the first sample in the epoch's global order.
        samples: how many, in a row.
        each: words a sample.
        stream: which purpose; other streams never share a word.

    Returns:
        uint64 [samples, each].
    """
    blocks = -(-each // 4)
    counter = np.array([first * blocks, plan.samples, 0, stream], np.uint64)
    key = np.array([plan.seed, epoch], np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw(samples * blocks * 4)
    return raw.reshape(samples, blocks * 4)[:, :each]


def uniforms(plan: Plan, epoch: int, first: int, samples: int, each: int) -> np.ndarray:
    """Returns float64 [samples, each] in [0, 1), for augmentation, by the samples' positions (see `words`)."""
    drawn = words(plan, epoch, first, samples, each, stream=AUGMENT_STREAM)
    return (drawn >> np.uint64(11)) * 2.0**-53  # 53 bits fill a double's mantissa
