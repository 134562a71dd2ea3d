"""Breaks the process that writes checkpoints at each of its system calls, and looks at what is left each time.

Usage: checkpoint_faults.py FOLDER FAULT. FAULT is "KILL", or the name of an error (ENOSPC, EIO, EROFS).
The fourth save writes, replaces the best and deletes an old one, while the writer's n-th call of write, fsync, rename,
unlink, rmdir or mkdir fails; n grows until it gets through. Prints the number of faults.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import sys
from pathlib import Path

from blob import content, state_of

from hvdtrain import Checkpointer, CheckpointError, Progress
from hvdtrain.checkpoint import writer as writer_module
from hvdtrain.checkpoint.writer import Writer

LOSSES = {1: 0.5, 2: 0.7, 3: 0.8, 4: 0.4, 5: 0.6, 6: 0.9}
# started, not forked: a child that is forked beside Horovod's threads may stop inside of fork
BROKEN = "from broken_calls import break_at; break_at({number}, {fault!r}, {struck!r}); "


class Breaking(Writer):
    """One whose process has a fault at its n-th call (0: none), and makes a file then."""

    def __init__(self, fault: str, number: int, struck: Path) -> None:
        super().__init__()
        self.main = BROKEN.format(number=number, fault=fault, struck=os.fspath(struck)) + writer_module.MAIN


def checkpointer(folder: Path) -> Checkpointer:
    return Checkpointer(folder, keep=2, best="val_loss")


def save(checkpoints: Checkpointer, step: int) -> None:
    progress = Progress(step=step, samples_seen=10 * step)
    checkpoints.save(state_of(step), progress=progress, metrics={"val_loss": LOSSES[step]})


def look(folder: Path, number: int) -> int:
    """Check what is left after a fault; return the step that is restored."""
    found = state_of(0)
    progress = checkpointer(folder).restore(found)
    assert progress is not None and progress.step in (3, 4), (number, progress)
    assert content(found) == content(state_of(progress.step)), (number, progress)
    infos = checkpointer(folder).list()
    assert all(info.ok for info in infos), "half a checkpoint under a checkpoint's name"
    steps = {info.progress.step for info in infos}
    assert {1, 3} <= steps or {3, 4} <= steps, (number, steps)
    return progress.step


def told(checkpoints: Checkpointer, fault: str) -> bool:
    """Whether the fault reaches the trainer, with its cause."""
    try:
        checkpoints.wait()
    except CheckpointError as error:
        cause = "SIGKILL" if fault == "KILL" else os.strerror(getattr(errno, fault))
        assert cause in error.received, error
        return True
    return False


def main() -> None:
    root, fault = Path(sys.argv[1]), sys.argv[2]
    struck = root / "struck"
    start = checkpointer(root / "start")
    for step in (1, 2, 3):
        save(start, step)
    start.wait()
    writer_module._writer._finish()  # type: ignore[union-attr]
    restored, failures = [], 0
    for number in itertools.count(1):
        folder = root / "broken"
        shutil.copytree(root / "start", folder)
        writer_module._writer = breaking = Breaking(fault, number, struck)
        checkpoints = checkpointer(folder)
        save(checkpoints, 4)
        failed = told(checkpoints, fault)
        breaking._finish()
        writer_module._writer = well = Breaking(fault, 0, struck)
        there = look(folder, number)
        assert there == 4 or failed, f"call {number}: step 4 is not there, and nobody was told"
        restored.append(there)
        failures += failed
        save(checkpoints, 5)  # the next one goes well, and sweeps what a dead one left
        save(checkpoints, 6)
        checkpoints.wait()
        kept = [info.progress.step for info in checkpoints.list()]
        assert kept in ([1, 5, 6], [4, 5, 6]), (number, kept)
        left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        assert not left, (number, left)
        well._finish()
        shutil.rmtree(folder)
        if not struck.exists():
            break
        struck.unlink()
    assert restored == sorted(restored), "once the new one is there, it is there"
    print(f"{len(restored) - 1} faults, told of {failures}, the new one was there after {restored.index(4)} of them")


if __name__ == "__main__":
    main()
