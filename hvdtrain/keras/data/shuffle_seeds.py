"""Random numbers of a user's data set that shuffles by the global generators: the same on all ranks."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvdtrain.world.streams import epoch_seed


class OwnRng:
    """Generators' states of its own, for an epoch of a data set: Python's, numpy's, PyTorch's where it is used, and
    what TensorFlow seeds the operations with that are made.

    Args:
        seed: of the loader.
        epoch: counted from 0.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        words = epoch_seed(seed, epoch)
        before = _states()
        random.seed(words)
        np.random.seed(words & 0xFFFFFFFF)
        if (torch := sys.modules.get("torch")) is not None:
            torch.default_generator.manual_seed(words >> 1)
        if (tensorflow := sys.modules.get("tensorflow")) is not None:
            tensorflow.random.set_seed(words >> 33)
        self._kept = _states()
        _put(before)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Makes these the generators while open."""
        before = _states()
        _put(self._kept)
        try:
            yield
        finally:
            self._kept = _states()
            _put(before)


def _states() -> tuple[Any, Any, Any, Any]:
    torch, context = sys.modules.get("torch"), _context()
    return (
        random.getstate(),
        np.random.get_state(),
        None if torch is None else torch.get_rng_state(),
        None if context is None else (context._seed, context._rng),
    )


def _put(states: tuple[Any, Any, Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    if states[2] is not None:
        sys.modules["torch"].set_rng_state(states[2])
    if states[3] is not None:
        context = _context()
        context._seed, context._rng = states[3]


def _context() -> Any:
    """What TensorFlow keeps its global seed in; None where it is not used."""
    module = sys.modules.get("tensorflow.python.eager.context")
    return None if module is None else module.context()
