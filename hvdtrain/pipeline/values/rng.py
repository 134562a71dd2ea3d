"""Random draws (dropout) that do not depend on which stage is faster, and are drawn alike when a pass is repeated.

PyTorch's layers draw from one generator for all threads, so stages that run at the same time would share it out by
chance. Here each segment of the model, and the loss, has its own stream of numbers for each micro-batch, made from the
state of the global generator when the step began: the same for any cut, schedule and recomputation. Around each
function that draws, and around nothing else, the global generator takes that stream's state. The first pass detects
draws outside of PyTorch's functions (a script, Python's and NumPy's random numbers): such a segment runs alone, with
all generators swapped.

With one micro-batch nothing runs at the same time, and the draws are those of the unsplit model.
"""

from __future__ import annotations

import hashlib
import re
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.generators import Generators
from hvdtrain.pipeline.values.threads import OwnMode
from hvdtrain.values.generators import differ, of_devices

# PyTorch's functions that draw, by name; what else a segment is seen to draw with is added in its first pass
_DRAWS = re.compile(
    r"dropout|bernoulli|multinomial|normal|^rand|random_|uniform_|exponential_|geometric_|cauchy_|poisson|rrelu|gumbel"
    r"|scaled_dot_product|multi_head_attention|fractional_max_pool"
)
# PyTorch's layers that draw, or will when their probability is raised
_LAYERS = re.compile(r"Dropout|RReLU|FractionalMaxPool|MultiheadAttention|Transformer")
_LOCK = threading.RLock()  # over the global generators


def alone() -> AbstractContextManager[Any]:
    """Keeps the generators as a stage sets them that repeats a part of its own in its backward pass."""
    return _LOCK


def may_draw(module: nn.Module) -> bool:
    """Returns True if a module that is called as a whole can draw in some mode: PyTorch's that do, any of a user's."""
    return any(
        not type(part).__module__.startswith("torch.nn.") or _LAYERS.search(type(part).__name__) is not None
        for part in module.modules()
    )


def draws_by_name(name: str) -> bool:
    """Returns True if the name of a function of PyTorch's shows that it draws."""
    return _DRAWS.search(name) is not None


@dataclass
class Seen:
    """The draws that the first pass of a segment showed."""

    functions: set[Any] = field(default_factory=set)  # PyTorch's that drew
    elsewhere: bool = False  # numbers were drawn by other means


class Stream(OwnMode, TorchFunctionMode):
    """A mode of this thread: while it is active, every function that draws takes its numbers from one stream.

    Each call is seeded by the function's name and how often it was called: what else draws changes nothing. `watch`
    notes in `seen` which functions draw.
    """

    def __init__(self, generators: Generators, seed: int, seen: Seen, *, watch: bool) -> None:
        super().__init__()
        self._generators, self._seed, self._seen, self._watch = generators, seed, seen, watch
        self._calls: dict[str, int] = {}
        self.used = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not self._watch and not draws_by_name(name) and func not in self._seen.functions:
            return func(*args, **kwargs)
        with _LOCK:
            before = self._generators.get()
            call = self._calls.get(name, 0)
            self._generators.seed(combined_seed(self._seed, name, call))
            swapped = self._generators.get()
            try:
                return func(*args, **kwargs)
            finally:
                if not all(map(torch.equal, swapped, self._generators.get())):
                    self.used = True
                    self._calls[name] = call + 1
                    if self._watch:
                        self._seen.functions.add(func)
                self._generators.set(before)


class Draws:
    """The streams of one step; it takes one global number if any was used. `seen`: what draws, by segment."""

    def __init__(self, seen: dict[Hashable, Seen], devices: Sequence[torch.device]) -> None:
        self._generators = of_devices(*devices)
        self._before = self._generators.everything()
        # of the global generator's state when the step begins
        self._step_seed = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=16).hexdigest()
        self._seen = seen
        self._used = False

    @contextmanager
    def of(
        self, generators: Generators, segment: Hashable, micro: int, *, again: bool = False, repeats: bool = False
    ) -> Iterator[None]:
        """The stream of one segment (or of the loss) for one micro-batch, from its start; `again`: in a repetition.
        `repeats`: it repeats a part of its own later, from the generators' state of now: it draws from them."""
        watch = segment not in self._seen and not again
        seen = self._seen.get(segment) or Seen()
        seed = combined_seed(self._step_seed, segment if isinstance(segment, int) else "loss", micro)
        if repeats:
            with _LOCK, generators.preserved(seed):
                first = generators.get()
                yield
                self._used = self._used or not all(map(torch.equal, first, generators.get()))
            return
        stream = Stream(generators, seed, seen, watch=watch)
        with ExitStack() as stack:
            if watch or seen.elsewhere:
                stack.enter_context(_LOCK)
                stack.enter_context(generators.preserved(seed))
                before = generators.everything()
                stack.callback(lambda: self._note(seen, before, generators.everything()))
            with stream:
                yield
        if stream.used or seen.elsewhere:
            self._used = True
        self._seen[segment] = seen

    @staticmethod
    def _note(seen: Seen, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
        seen.elsewhere = seen.elsewhere or differ(before, after)

    def check(self, *, repeats: bool) -> None:
        """Warns of numbers that others drew from the global generators; raises `ConfigError` if passes were
        repeated."""
        elsewhere = any(seen.elsewhere for seen in list(self._seen.values()))
        parts = 3 if elsewhere else 1
        if not differ(self._before[:parts], self._generators.everything()[:parts]):
            return
        rule = "while a pipeline works, other code must not draw from the global generators"
        received = "numbers were drawn by another thread, or by a layer that drew none in its first pass"
        remedy = "a torch.Generator or random.Random of its own for the other thread; split again after a layer changed"
        if repeats:
            raise ConfigError(rule, f"{received}; with remat, a pass may have been repeated with other numbers", remedy)
        warnings.warn(f"{rule}: {received}, so that a seed does not repeat this step. Fix: {remedy}", stacklevel=5)

    def close(self) -> None:
        """The next step draws other numbers, if this one drew any."""
        if self._used:
            torch.randint(2**62, ())


def combined_seed(*numbers: Any) -> int:
    """A seed that depends on all of them."""
    text = " ".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
