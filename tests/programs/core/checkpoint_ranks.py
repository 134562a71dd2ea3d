"""Checkpoints on two ranks that may see different disks; usage: checkpoint_ranks.py FOLDER SCENARIO..."""

from __future__ import annotations

import resource
import signal
import sys
import tempfile
from pathlib import Path

import torch_engine  # noqa: F401 (takes the adapter's place)
from blob import Blob, content, state_of

from hvdtrain import (
    Checkpointer,
    CheckpointError,
    HvdtrainError,
    MainRankError,
    Progress,
    ReplicaError,
    World,
    exit_with,
    init,
)
from hvdtrain.checkpoint import checkpoint_files

SIZE_BYTES = 10_000


def save(folder: Path, step: int, saved_step: int | None = None) -> Path:
    """Save on all ranks; `saved_step` puts another content into it."""
    state = state_of(saved_step or step, SIZE_BYTES)
    checkpoints = Checkpointer(folder)
    path = checkpoints.save(state, progress=Progress(step=step))
    checkpoints.wait()
    return path


def restored(folder: Path) -> int | None:
    state = {"a.bin": Blob(), "b.bin": Blob()}
    progress = Checkpointer(folder).restore(state)
    if progress is None:
        return None
    assert content(state) == content(state_of(progress.step, SIZE_BYTES))
    return progress.step


def refused(kind: type[HvdtrainError], call: object, *args: object, **kw: object) -> HvdtrainError:
    try:
        call(*args, **kw)  # type: ignore[operator]
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def shared(world: World, folder: Path) -> None:
    path = save(folder, 1)
    assert path.is_dir() and [entry.name for entry in folder.iterdir()] == ["epoch-0000-step-000001"]
    assert restored(folder) == 1


def rank_1_sees_nothing(world: World, folder: Path) -> None:
    save(folder, 3)
    tempfile.tempdir = str(folder / f"temporary{world.rank}")
    Path(tempfile.tempdir).mkdir()
    assert restored(folder if world.is_main else folder / "not_here") == 3
    assert list(Path(tempfile.tempdir).iterdir()) == [], "what was sent is not left lying about"
    tempfile.tempdir = None


def rank_1_sees_something_else(world: World, folder: Path) -> None:
    """The same names with other bytes: rank 1's disk is a stale copy."""
    own = folder / f"disk{world.rank}"
    solo = Checkpointer(own, world=World.solo())
    solo.save(state_of(7 if world.is_main else 8, SIZE_BYTES), progress=Progress(step=7))
    solo.wait()
    assert restored(own) == 7


def rank_0_falls_back(world: World, folder: Path) -> None:
    save(folder, 1)
    newest = save(folder, 2)
    if world.is_main:
        (newest / "a.bin").write_bytes(b"?" * SIZE_BYTES)
    world.barrier()
    assert restored(folder if world.is_main else folder / "not_here") == 1


def nothing(world: World, folder: Path) -> None:
    assert restored(folder) is None


def all_damaged(world: World, folder: Path) -> None:
    path = save(folder, 1)
    if world.is_main:
        (path / "manifest.json").write_text("")
    world.barrier()
    error = refused(CheckpointError if world.is_main else MainRankError, restored, folder)
    assert "a checkpoint that is complete and readable" in str(error)


def save_fails_on_rank_0(world: World, folder: Path) -> None:
    if world.is_main:
        folder.parent.mkdir(exist_ok=True)
        folder.write_text("a file in its place")
    world.barrier()
    error = refused(CheckpointError if world.is_main else MainRankError, save, folder, 1)
    assert "written whole" in str(error)


def load_fails_on_rank_1(world: World, folder: Path) -> None:
    class Refusing(Blob):
        def load(self, path: Path) -> None:
            raise ValueError("not on this rank")

    save(folder, 1)
    part = Blob() if world.is_main else Refusing()
    error = refused(CheckpointError, Checkpointer(folder).restore, {"a.bin": part})
    assert "rank 1: ValueError: not on this rank" in str(error) and "rank 0" not in error.received


def not_at_the_same_point(world: World, folder: Path) -> None:
    error = refused(ReplicaError, save, folder, 1 + world.rank)
    assert "rank 0: Progress(epoch=0, step=1" in str(error) and "rank 1: Progress(epoch=0, step=2" in str(error)


def disk_of_rank_1_is_full(world: World, folder: Path) -> None:
    """What rank 1 is sent has no place there: it goes on receiving, and then all are told."""
    save(folder, 1)
    if world.rank == 1:
        tempfile.tempdir = "/proc/self"  # nothing can be made there
    error = refused(HvdtrainError, restored, folder if world.is_main else folder / "not_here")
    tempfile.tempdir = None
    assert "rank 1" in str(error), error


def disk_of_rank_1_fills_up(world: World, folder: Path) -> None:
    """The first chunk has a place there, the others have none: it goes on receiving, and then all are told."""
    save(folder, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (checkpoint_files.CHUNK_BYTES + 1, limits[1]))
    error = refused(HvdtrainError, restored, folder if world.is_main else folder / "not_here")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "rank 1: OSError" in str(error) and "rank 0" not in error.received, error


def main() -> None:
    checkpoint_files.CHUNK_BYTES = 3000  # several chunks a file, the last one short
    world = init("torch")
    try:
        with world:
            for scenario in sys.argv[2:]:
                globals()[scenario](world, Path(sys.argv[1]) / scenario)
                world.barrier()
                print(f"{scenario}: passed", flush=True)
    except Exception as error:
        exit_with("checkpoint_ranks", error, world.rank)


if __name__ == "__main__":
    main()
