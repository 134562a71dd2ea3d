"""Random numbers of samples by their place in the epoch: the same at any world size, batch and resume; pure."""

from __future__ import annotations

import numpy as np

from hvdtrain.core.sharding import Plan

# One stream of random words a purpose: the last word of Philox's counter, which the order of samples leaves at 0.
AUGMENT_STREAM, SEED_STREAM = 1, 2


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
