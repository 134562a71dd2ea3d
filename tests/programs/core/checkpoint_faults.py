"""Breaks the process that writes checkpoints at each of its system calls, and looks at what is left each time.

Usage: checkpoint_faults.py FOLDER FAULT [RANK]. FAULT is "KILL", or the name of an error (ENOSPC, EIO, EROFS). Started
on two ranks, which write each checkpoint together, it is the process of that RANK that is broken.
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

from blob import Common, content, state_of

from hvdtrain import Checkpointer, CheckpointError, MainRankError, Progress, World, init
from hvdtrain.checkpoint import together
from hvdtrain.checkpoint import writer as writer_module
from hvdtrain.checkpoint.checkpoint_files import read_manifest
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
    return Checkpointer(folder, keep=2, best="val_loss", together=True)


def save(checkpoints: Checkpointer, step: int) -> None:
    progress = Progress(step=step, samples_seen=10 * step)
    checkpoints.save(state_of(step, kind=Common), progress=progress, metrics={"val_loss": LOSSES[step]})


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


def told(checkpoints: Checkpointer, fault: str, broken: int) -> bool:
    """Whether the fault reaches the trainer, on every rank, with its cause."""
    try:
        checkpoints.wait()
    except (CheckpointError, MainRankError) as error:
        cause = "SIGKILL" if fault == "KILL" else os.strerror(getattr(errno, fault))
        if broken:
            cause = f"rank {broken}: {'the process that wrote its part has ended' if fault == 'KILL' else cause}"
        assert cause in error.received, error
        return True
    return False


def main(world: World, fault: str, broken: int) -> None:
    root = Path(sys.argv[1])
    struck = root / "struck"
    start = checkpointer(root / "start")
    for step in (1, 2, 3):
        save(start, step)
    start.wait()
    assert read_manifest(start.list()[-1].path)["format"] == (1 if world.size == 1 else 2)
    writer_module._writer._finish()  # type: ignore[union-attr]
    restored, failures = [], 0
    for number in itertools.count(1):
        folder = root / "broken"
        world.on_main(shutil.copytree, root / "start", folder)
        writer_module._writer = breaking = Breaking(fault, number if world.rank == broken else 0, struck)
        checkpoints = checkpointer(folder)
        save(checkpoints, 4)
        failed = told(checkpoints, fault, broken)
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
        assert all(read_manifest(info.path)["format"] == (1 if world.size == 1 else 2) for info in checkpoints.list())
        world.barrier()
        well._finish()
        world.on_main(shutil.rmtree, folder)
        if not world.on_main(struck.exists):
            break
        world.on_main(struck.unlink)
    assert restored == sorted(restored), "once the new one is there, it is there"
    print(f"{len(restored) - 1} faults, told of {failures}, the new one was there after {restored.index(4)} of them")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        main(World.solo(), sys.argv[2], 0)
    else:
        import torch_engine  # noqa: F401 (takes the adapter's place)

        together.LEAST_BYTES, together.STRIPE_BYTES = 1, 64  # two stripes a file
        with init("torch") as ranks:
            main(ranks, sys.argv[2], int(sys.argv[3]))
