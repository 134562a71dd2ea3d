"""Random numbers: the state of every generator that a training program may draw from."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


def random_streams(gpus: Sequence[int]) -> dict[str, Any]:
    """The state of every generator of this rank that a training program may draw from; of all its GPUs."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "more_cuda": [torch.cuda.get_rng_state(gpu) for gpu in gpus[1:]],
        "python": [version, list(words), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, np.int64)), *rest],
    }


def restore_streams(saved: Mapping[str, Any], gpus: Sequence[int]) -> None:
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
    for gpu, state in zip(gpus[1:], saved.get("more_cuda", ()), strict=False):  # as far as there are as many
        torch.cuda.set_rng_state(state, gpu)
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = saved["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
