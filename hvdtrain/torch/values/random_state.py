"""Random numbers: the state of every generator that a training program may draw from."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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


def seed_all(seed: int) -> None:
    """Seeds Python's, numpy's and PyTorch's (CPU) generators with 64 bits."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Puts the generators of Python, numpy and PyTorch (CPU) back at the end."""
    kept = generators()
    try:
        yield
    finally:
        _put(kept)


class OwnRng:
    """Generators' states of its own, for code that runs in turns with other code: each sees its own numbers only."""

    def __init__(self, seed: int) -> None:
        with preserved_rng():
            seed_all(seed)
            self._kept = generators()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with preserved_rng():
            _put(self._kept)
            try:
                yield
            finally:
                self._kept = generators()


def generators() -> tuple[Any, Any, Any]:
    """Returns the states of the generators of Python, numpy and PyTorch (CPU)."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def drawn_since(states: tuple[Any, Any, Any]) -> bool:
    """Returns whether one of these generators was drawn from, or set."""
    python, (_, keys, *rest), of_torch = generators()
    _, keys_before, *rest_before = states[1]
    numpy_s = rest == rest_before and np.array_equal(keys, keys_before)
    return not (python == states[0] and numpy_s and torch.equal(of_torch, states[2]))


def _put(states: tuple[Any, Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
