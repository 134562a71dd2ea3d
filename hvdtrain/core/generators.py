"""The global generators of random numbers: Python's, NumPy's, and those of the frameworks that are imported."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

State = tuple[list[Any], Any, Any]  # of the frameworks' generators, of Python's, of NumPy's


class Generators:
    """The generators that a program draws from: Python's, NumPy's, and those of frameworks, which have `get_state`,
    `set_state` and `manual_seed` like PyTorch's."""

    def __init__(self, of_frameworks: Sequence[Any] = ()) -> None:
        self._of_frameworks = of_frameworks

    def get(self) -> list[Any]:
        """Returns the states of the frameworks' generators."""
        return [generator.get_state() for generator in self._of_frameworks]

    def set(self, states: Sequence[Any]) -> None:
        """Puts the frameworks' generators into these states."""
        for generator, state in zip(self._of_frameworks, states, strict=True):
            generator.set_state(state)

    def seed(self, seed: int) -> None:
        """Seeds the frameworks' generators with 63 bits."""
        for generator in self._of_frameworks:
            generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)

    def everything(self) -> State:
        import numpy as np

        return self.get(), random.getstate(), np.random.get_state(legacy=True)

    def restore(self, everything: State) -> None:
        import numpy as np

        of_frameworks, python, numpy = everything
        self.set(of_frameworks)
        random.setstate(python)
        np.random.set_state(numpy)

    def seed_everything(self, seed: int) -> None:
        import numpy as np

        self.seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)

    @contextmanager
    def preserved(self, state: State | int | None = None) -> Iterator[None]:
        """Restores all at the end; inside they are in this state, or seeded with this number, or continue."""
        before = self.everything()
        try:
            if isinstance(state, int):
                self.seed_everything(state)
            elif state is not None:
                self.restore(state)
            yield
        finally:
            self.restore(before)


class OwnRandom:
    """Random numbers of its own, for code that runs in turns with other code: `state` is that of the generators when
    the code runs next, at first the given state or seed."""

    def __init__(self, generators: Generators, state: State | int) -> None:
        self._generators = generators
        with generators.preserved(state):
            self.state = generators.everything()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Runs the code: the generators are its own inside, and as they were at the end."""
        with self._generators.preserved(self.state):
            try:
                yield
            finally:
                self.state = self._generators.everything()


class TensorFlowSeeds:
    """TensorFlow's source of seeds for new operations, in `tensorflow.python.eager.context.context()`; it has no
    generator before a seed is set."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def get_state(self) -> Any:
        drawing = None if self._context._seed is None else self._context._rng.getstate()
        return self._context._seed, drawing

    def set_state(self, state: Any) -> None:
        self._context._seed, drawing = state
        if drawing is not None:
            self._context._rng = random.Random(0)
            self._context._rng.setstate(drawing)

    def manual_seed(self, seed: int) -> None:
        sys.modules["tensorflow"].random.set_seed(seed >> 32)


def of_imported() -> Generators:
    """Returns the generators of this process: Python's, NumPy's, and of PyTorch (CPU) and TensorFlow if imported."""
    found: list[Any] = []
    if (torch := sys.modules.get("torch")) is not None:
        found.append(torch.default_generator)
    if (context := sys.modules.get("tensorflow.python.eager.context")) is not None and "tensorflow" in sys.modules:
        found.append(TensorFlowSeeds(context.context()))
    return Generators(found)
