"""Checkpoints of steps, made and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blob import content, state_of

from hvdtrain import Checkpointer, Progress


def synchronous(folder: Path, **options: Any) -> Checkpointer:
    """Return one that starts no process."""
    return Checkpointer(folder, asynchronous=False, **options)


def save(folder: Path, step: int, loss: float | None = None, **options: Any) -> Path:
    metrics = {} if loss is None else {"val_loss": loss}
    return synchronous(folder, **options).save(state_of(step), progress=progress_at(step), metrics=metrics)


def progress_at(step: int) -> Progress:
    return Progress(epoch=step // 10, step=step, samples_seen=32 * step, samples_in_epoch=32 * (step % 10))


def restored(folder: Path, **options: Any) -> Progress | None:
    """Restore, and check that what comes is what was saved at that step."""
    state = state_of(0)
    own = {name: options.pop(name) for name in ("best", "mode") if name in options}
    progress = Checkpointer(folder, **own).restore(state, **options)
    if progress is not None:
        assert progress == progress_at(progress.step)
        assert content(state) == content(state_of(progress.step))
    return progress


def step_of(progress: Progress | None) -> int:
    assert progress is not None
    return progress.step


def steps(folder: Path) -> list[int]:
    return [info.progress.step for info in Checkpointer(folder).list()]
