"""The global generators of random numbers: Python's, NumPy's and PyTorch's."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

State = tuple[list[Tensor], Any, Any]  # of PyTorch's generators, of Python's, of NumPy's


class Generators:
    """What a program draws from: PyTorch's generators of the CPU and of some devices, Python's and NumPy's."""

    def __init__(self, *devices: torch.device) -> None:
        gpus = sorted({torch.cuda._utils._get_device_index(d, optional=True) for d in devices if d.type == "cuda"})
        if gpus:
            torch.cuda.init()
        self._all = [torch.default_generator, *(torch.cuda.default_generators[gpu] for gpu in gpus)]

    def get(self) -> list[Tensor]:
        """Returns the states of PyTorch's."""
        return [generator.get_state() for generator in self._all]

    def set(self, states: Sequence[Tensor]) -> None:
        """Puts PyTorch's into these states."""
        for generator, state in zip(self._all, states, strict=True):
            generator.set_state(state)

    def seed(self, seed: int) -> None:
        """Seeds PyTorch's with 63 bits."""
        for generator in self._all:
            generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)

    def everything(self) -> State:
        """Returns the states of all."""
        return self.get(), random.getstate(), np.random.get_state()

    def restore(self, everything: State) -> None:
        """Puts all into these states."""
        ours, python, numpy = everything
        self.set(ours)
        random.setstate(python)
        np.random.set_state(numpy)

    def seed_everything(self, seed: int) -> None:
        """Seeds all."""
        self.seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)

    @contextmanager
    def preserved(self, state: State | int | None = None) -> Iterator[None]:
        """Puts all back at the end; inside they are in this state, or seeded by this number, or go on."""
        before = self.everything()
        try:
            if isinstance(state, int):
                self.seed_everything(state)
            elif state is not None:
                self.restore(state)
            yield
        finally:
            self.restore(before)


HOST = Generators()  # those of no GPU


def of_all_gpus() -> Generators:
    """Returns the generators of every GPU that this process sees, and the host's."""
    return Generators(*(torch.device("cuda", gpu) for gpu in range(torch.cuda.device_count())))


def differ(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Compares two states of `Generators.everything`, or their first parts, which are PyTorch's."""
    if not all(map(torch.equal, one[0], other[0])):
        return True
    if len(one) == 1:
        return False
    (_, python, numpy), (_, their_python, their_numpy) = one, other
    return python != their_python or numpy[2:] != their_numpy[2:] or not np.array_equal(numpy[1], their_numpy[1])
