"""What a proof knows of a script on PyTorch and Horovod, or hvdtrain: what is averaged, and what is made alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvdtrain.migrate.rank import wrap
from hvdtrain.migrate.torch_watch import TorchWatch


class Watch(TorchWatch):
    """Counts steps of the optimizers that are wrapped, or prepared."""

    def __init__(self, limit: int, *, wraps: bool) -> None:
        self._distributed: list[Any] = []  # optimizers
        super().__init__(limit, wraps=wraps)
        wrap(hvd, "DistributedOptimizer", self._wrapped)
        self._alike_in_hvdtrain()

    def is_distributed(self, optimizer: Any) -> bool:
        return any(optimizer is one for one in self._distributed)

    def _wrapped(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._distributed.append(optimizer := original(*args, **kwargs))
        return optimizer

    def _alike_in_hvdtrain(self) -> None:
        """The streams of random numbers stay the script's own: hvdtrain gives each rank others."""
        import hvdtrain
        import hvdtrain.torch

        def init(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with _kept_streams():
                return original(*args, **kwargs)

        def prepare(original: Callable[..., Any], model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._distributed += optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
            return init(original, model, optimizer, *args, **kwargs)

        wrap(hvdtrain, "init", init)
        wrap(hvdtrain.torch, "prepare", prepare)

    def rank(self) -> int:
        return hvd.rank()

    def end(self) -> None:
        hvd.barrier()
        hvd.shutdown()


@contextmanager
def _kept_streams() -> Iterator[None]:
    """Random numbers go on as if what is within had drawn and seeded nothing."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.cuda.get_rng_state_all()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.cuda.set_rng_state_all(states[3])
