"""Files that only rank 0 is sure to have, on every rank."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdtrain.errors import CheckpointError
from hvdtrain.manifest import verify
from hvdtrain.world import World

CHUNK_BYTES = 64 << 20


@contextmanager
def local_copy(
    world: World, path: Path, files: Mapping[str, dict[str, Any]]
) -> Iterator[tuple[Path, Exception | None]]:
    """Give a folder with the files on this rank, sent by rank 0 where they are missing, and what failed.

    Failures are handed on, not raised: this rank must take part in what the others do next.
    """
    here = world.is_main or has_files(path, files)
    failure: Exception | None
    folder, failure = (path, None) if here else _temporary_folder()
    try:
        if not all(world.gather(here)):
            for name, sealed in files.items():
                target = None if here or failure else folder / name
                failure = _send(world, path / name, target, sealed["bytes"]) or failure
            if not here and failure is None and not has_files(folder, files):
                failure = CheckpointError("every rank must get the bytes that rank 0 has", "they arrived damaged")
        yield folder, failure
    finally:
        if folder != path:
            shutil.rmtree(folder, ignore_errors=True)


def _temporary_folder() -> tuple[Path, OSError | None]:
    try:
        return Path(tempfile.mkdtemp(prefix="hvdtrain-")), None
    except OSError as error:
        return Path(tempfile.gettempdir()) / "hvdtrain-none", error


def _send(world: World, source: Path, target: Path | None, size_bytes: int) -> Exception | None:
    """Broadcast a file from rank 0 in chunks; ranks with a `target` write it there.

    A rank whose disk fails goes on receiving, and rank 0 sends empty chunks: the others wait for them.
    """
    failure: Exception | None = None
    for start in range(0, size_bytes, CHUNK_BYTES):
        data = b""
        if world.is_main:
            try:
                data = _read_chunk(source, start)
            except OSError as error:
                failure = error
        data = world.comm.broadcast_bytes(data, 0)
        if target is not None and failure is None:
            failure = _append(target, data)
    return _append(target, b"") if target is not None and size_bytes == 0 else failure


def _append(path: Path, data: bytes) -> OSError | None:
    try:
        with open(path, "ab") as file:
            file.write(data)
    except OSError as error:
        return error
    return None


def _read_chunk(path: Path, start: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(CHUNK_BYTES)


def has_files(path: Path, files: Mapping[str, dict[str, Any]]) -> bool:
    """Whether this rank sees the same checkpoint as rank 0."""
    try:
        verify(path, files)
    except (OSError, CheckpointError):
        return False
    return True
