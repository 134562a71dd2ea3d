"""Kills a process at every line it runs while saving, and looks at what is left each time.

Usage: checkpoint_kills.py FOLDER STRIDE [--naive]. The fourth save writes, replaces the best and deletes an old one.
A child, forked, runs it with a tracer that ends it by SIGKILL at the n-th line of the checkpoint code (of shutil as
well: deletion in halves); n grows by STRIDE until the child gets through. Prints the number of kills. --naive is the
negative twin: it deletes the old checkpoints, then writes the new one.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from blob import content, state_of

from hvdtrain import Checkpointer, Progress
from hvdtrain.checkpoint import checkpoint, checkpoint_files, checkpoint_folder, staging
from hvdtrain.checkpoint.checkpoint_folder import CheckpointFolder, Written
from hvdtrain.checkpoint.staging import StateFile

TRACED = {module.__file__ for module in (checkpoint, checkpoint_files, checkpoint_folder, staging, shutil)}


class Naive(CheckpointFolder):
    def add(self, written: Written, name: str, parts: Mapping[str, Callable[[StateFile], object]]) -> Path:
        for info in self.list():
            shutil.rmtree(info.path)
        return super().add(written, name, parts)


def checkpointer(folder: Path, kind: type[CheckpointFolder] = CheckpointFolder) -> Checkpointer:
    found = Checkpointer(folder, keep=2, best="val_loss", asynchronous=False)
    found.folder = kind(folder, 2, "val_loss", "min")
    return found


def save(folder: Path, step: int, kind: type[CheckpointFolder] = CheckpointFolder) -> None:
    losses = {1: 0.5, 2: 0.7, 3: 0.8, 4: 0.4, 5: 0.6}
    progress = Progress(step=step, samples_seen=10 * step)
    checkpointer(folder, kind).save(state_of(step), progress=progress, metrics={"val_loss": losses[step]})


def kill_at(line_number: int) -> Any:
    """Return a tracer that kills this process at its n-th traced line."""
    left = line_number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


def killed_save(folder: Path, line_number: int) -> bool:
    """Save step 4 in a child that dies at `line_number`; return whether it died."""
    child = os.fork()
    if child == 0:
        sys.settrace(kill_at(line_number))
        save(folder, 4, Naive if "--naive" in sys.argv else CheckpointFolder)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0, f"exit status {status}"
    return os.WIFSIGNALED(status)


def look(folder: Path, line_number: int) -> int:
    """Check what is left after a kill; return the step that is restored."""
    found = state_of(0)
    progress = checkpointer(folder).restore(found)
    assert progress is not None, line_number
    assert content(found) == content(state_of(progress.step)), (line_number, progress)
    assert progress == Progress(step=progress.step, samples_seen=10 * progress.step)
    good = [info.progress.step for info in checkpointer(folder).list() if info.ok]
    assert progress.step in (3, 4) and {1, 3} <= set(good) or {3, 4} <= set(good), (line_number, good)
    assert all(info.ok for info in checkpointer(folder).list()), "half a checkpoint under a checkpoint's name"
    return progress.step


def main() -> None:
    start = Path(sys.argv[1]) / "start"
    for step in (1, 2, 3):
        save(start, step)
    restored = []
    for line_number in itertools.count(1, int(sys.argv[2])):
        folder = Path(sys.argv[1]) / "killed"
        shutil.copytree(start, folder)
        died = killed_save(folder, line_number)
        restored.append(look(folder, line_number))
        save(folder, 5)  # the next save goes well, and sweeps what the dead one left
        assert [info.progress.step for info in checkpointer(folder).list()] in ([1, 3, 5], [3, 5], [4, 5])
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
        shutil.rmtree(folder)
        if not died:
            break
    assert restored == sorted(restored), "once the new one is there, it is there"
    print(f"{len(restored) - 1} kills, the new checkpoint was there after {restored.index(4)} of them")


if __name__ == "__main__":
    main()
