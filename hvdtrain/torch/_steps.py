"""What each step of an epoch serves to this rank, and to which update it belongs; pure numbers, known in advance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hvdtrain.shard import Plan, contiguous

# One stream of random words a purpose: the last word of Philox's counter, which the order of samples leaves at 0.
AUGMENT_STREAM, SEED_STREAM = 1, 2


@dataclass(frozen=True, eq=False)
class Step:
    """This rank's part of one global step.

    Attributes:
        epoch: counted from 0.
        first: where in the epoch's global order this rank's samples begin.
        indices: int64 [n], this rank's samples; n may be 0 in a tail.
        global_samples: samples of all ranks in this step, as planned.
        consumed: samples of all ranks that are done in the epoch after it.
        update_samples: samples of all ranks in all micro-batches of its update, as planned.
        closes: it is the last micro-batch of its update.
    """

    epoch: int
    first: int
    indices: np.ndarray
    global_samples: int
    consumed: int
    update_samples: int
    closes: bool


def steps_of(plan: Plan, epoch: int, consumed: int, *, rank: int, accumulate: int = 1) -> Iterator[Step]:
    """Yields rank's steps for the rest of an epoch; an update takes `accumulate` of them, the epoch's last maybe fewer.

    Raises:
        ConfigError: `consumed` out of range.
    """
    order = plan.order(epoch)
    count = plan.steps(consumed)
    window = plan.global_batch * accumulate
    end = min(plan.samples, consumed + count * plan.global_batch)
    for number in range(count):
        start = consumed + number * plan.global_batch
        size = min(plan.global_batch, end - start)
        mine = contiguous(size, rank, plan.size)
        window_start = consumed + (start - consumed) // window * window
        yield Step(
            epoch=epoch,
            first=start + mine.start,
            indices=order[start + mine.start : start + mine.stop],
            global_samples=size,
            consumed=start + size,
            update_samples=min(window, end - window_start),
            closes=(number + 1) % accumulate == 0 or number + 1 == count,
        )


def words(seed: int, epoch: int, first: int, samples: int, each: int, *, stream: int) -> np.ndarray:
    """Returns random words for samples by their position in the epoch: the same at any world size, batch and resume.

    Philox is a function of key and counter (Salmon et al. 2011); numpy promises its words never to change (NEP 19).
    Each sample has whole blocks of four words for itself, so that a rank starts anywhere without drawing all before.

    Args:
        seed, epoch: the key.
        first: position of the first sample in the epoch's global order.
        samples: how many, in a row.
        each: words a sample.
        stream: which purpose; other streams never share a word.

    Returns:
        uint64 [samples, each].
    """
    blocks = -(-each // 4)
    counter = np.array([first * blocks, 0, 0, stream], np.uint64)
    raw = np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=counter).random_raw(samples * blocks * 4)
    return raw.reshape(samples, blocks * 4)[:, :each]


def uniforms(seed: int, epoch: int, first: int, samples: int, each: int) -> np.ndarray:
    """Returns float64 [samples, each] in [0, 1), for augmentation, by the samples' positions (see `words`)."""
    drawn = words(seed, epoch, first, samples, each, stream=AUGMENT_STREAM)
    return (drawn >> np.uint64(11)) * 2.0**-53  # 53 bits fill a double's mantissa
