"""Reports an optimizer that steps on several ranks in a program that has prepared none: each rank trains alone."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

PREPARE = "model, optimizer = hvdtrain.torch.prepare(model, optimizer, train)"
reported = False  # an optimizer that averages nothing
_watching: list[RemovableHandle] = []


def watch(rank: int, size: int) -> None:
    """Watches the steps of all optimizers, until the first one or `stop`."""
    if size > 1 and not _watching:
        _watching.append(register_optimizer_step_post_hook(partial(_report, rank, size)))


def stop() -> None:
    while _watching:
        _watching.pop().remove()


def _report(rank: int, size: int, optimizer: Optimizer, *_: Any) -> None:
    global reported
    stop()
    if not hasattr(optimizer, "synchronize"):
        reported = True
    if rank == 0 and not hasattr(optimizer, "synchronize"):  # which Horovod's own has: it averages
        print(
            f"hvdtrain: {type(optimizer).__name__}.step() on {size} ranks, but prepare() was not called: hvdtrain"
            f" averages nothing\n  fix: {PREPARE}",
            flush=True,
        )
