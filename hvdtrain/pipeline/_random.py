"""Random draws (dropout) that do not depend on which stage is faster.

PyTorch's layers draw from one generator for all threads, so stages that run at the same time would share it out by
chance. Here each segment of the model has its own stream of numbers for each micro-batch, made from one draw of the
global generator a step: the same for any cut, schedule and recomputation. Around each function that draws, and around
nothing else, the global generator is lent to that stream.

With one micro-batch nothing runs at the same time, and the draws are those of the unsplit model.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# PyTorch's functions that draw, by name; what else a segment is seen to draw with is added in its first pass
_DRAWS = re.compile(
    r"dropout|bernoulli|multinomial|normal|^rand|random_|uniform_|exponential_|geometric_|cauchy_|poisson|rrelu|gumbel"
    r"|scaled_dot_product|multi_head_attention|fractional_max_pool"
)
_LOCK = threading.Lock()  # over the global generators


class Generators:
    """The state of the generators that a stage draws from: the CPU's, and its GPU's."""

    def __init__(self, device: torch.device) -> None:
        self._all: list[torch.Generator] = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._all.append(torch.cuda.default_generators[index])

    def get(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._all]

    def set(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._all, states, strict=True):
            generator.set_state(state)

    def seed(self, seed: int) -> None:
        for generator in self._all:
            generator.manual_seed(seed)

    @contextmanager
    def lent(self, states: Sequence[Tensor] | None) -> Iterator[None]:
        """Puts the generators into these states (None: leaves them), and back at the end."""
        before = self.get()
        if states is not None:
            self.set(states)
        try:
            yield
        finally:
            self.set(before)


class Stream(TorchFunctionMode):
    """While active, in this thread: every function that draws takes its numbers from one stream.

    Args:
        generators: those that are lent.
        seed: of the stream.
        known: functions seen to draw here before; None: this is the segment's first pass. Then every function is
            watched, and `found` holds those that drew.
    """

    def __init__(self, generators: Generators, seed: int, known: frozenset[Any] | None) -> None:
        super().__init__()
        self._generators, self._seed, self._known = generators, seed, known
        self._states: list[Tensor] | None = None
        self.found: set[Any] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        named = _DRAWS.search(getattr(func, "__name__", "")) is not None
        if not named and self._known is not None and func not in self._known:
            return func(*args, **kwargs)
        with _LOCK:
            before = self._generators.get()
            if self._states is None:
                self._generators.seed(self._seed)
                self._states = self._generators.get()
            else:
                self._generators.set(self._states)
            try:
                return func(*args, **kwargs)
            finally:
                after = self._generators.get()
                if self._known is None and not all(map(torch.equal, after, self._states)):
                    self.found.add(func)
                self._states = after
                self._generators.set(before)


class Draws:
    """The streams of one step.

    Args:
        step_seed: drawn from the global generator.
        known: functions that draw, by segment; filled in the first pass of each.
    """

    def __init__(self, step_seed: int, known: dict[int, frozenset[Any]]) -> None:
        self._step_seed = step_seed
        self._known = known

    @contextmanager
    def of(self, generators: Generators, segment: int, micro: int) -> Iterator[None]:
        """The stream of one segment for one micro-batch, from its start."""
        stream = Stream(generators, mixed(self._step_seed, segment, micro), self._known.get(segment))
        with stream:
            yield
        if segment not in self._known:
            self._known[segment] = frozenset(stream.found)


def step_seed() -> int:
    """Draws the seed of a step from the global generator."""
    return int(torch.randint(2**62, ()).item())


def mixed(*numbers: int) -> int:
    """A seed that depends on all of the numbers."""
    text = " ".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
