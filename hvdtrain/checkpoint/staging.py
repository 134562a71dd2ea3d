"""Destinations for the state of a checkpoint's part: a file on disk, or an image of it in memory that another process
can read (Linux' memfd: it has no name, so that it vanishes when a process is killed).

Images are reused: memory that a process has touched before takes a copy at the speed of memory, which fresh pages do
not (400 MB: 0.02 s and 0.2 to 0.5 s on a virtual machine).

An image can leave a zip archive to the process that writes it to disk: the checksums of the entries take as long as
writing them.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import time
import zipfile
from pathlib import Path
from typing import Any

_CHUNK = 1 << 20  # stays in the processor's cache


class StateFile(io.RawIOBase):
    """A file to write to: on disk, or an image in memory whose first bytes are `mapped`.

    Attributes:
        size: bytes so far.
        entry: the name and length of what the file begins with, if that is to be an entry of a zip archive; what
            follows it is an archive of the other entries.
        failure: why the operating system could not write: libraries report it in words of their own.
    """

    def __init__(
        self, name: str, descriptor: int, mapped: memoryview | None = None, *, in_memory: bool = False
    ) -> None:
        self._name, self._descriptor, self.in_memory = name, descriptor, in_memory
        self._mapped = mapped if mapped is not None else memoryview(b"")
        self._at = self.size = 0
        self.entry: tuple[str, int] | None = None
        self.failure: OSError | None = None

    @classmethod
    def on_disk(cls, path: Path) -> StateFile:
        """Makes a file, with the permissions that the umask gives."""
        return cls(path.name, os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o666))

    @property
    def path(self) -> str:
        """The path at which this process can read the written state until the file is closed."""
        return f"/proc/self/fd/{self._descriptor}"

    def __str__(self) -> str:
        return self._name

    def fileno(self) -> int:
        return self._descriptor

    def readable(self) -> bool:
        return self.in_memory

    def readinto(self, buffer: Any) -> int:
        done = os.preadv(self._descriptor, [buffer], self._at)
        self._at += done
        return done

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def truncate(self, size: int | None = None) -> int:
        self.size = self._at if size is None else size
        return self.size

    def write(self, data: Any) -> int:
        """Writes all of `data` and returns its bytes; raises OSError if there is no room."""
        given = memoryview(data)
        view = given.cast("B") if given.nbytes else memoryview(b"")
        place, end = self._at, self._at + len(view)
        done = min(max(len(self._mapped) - place, 0), len(view))
        if done:
            self._mapped[place : place + done] = view[:done]
        try:
            while done < len(view):
                done += os.pwrite(self._descriptor, view[done:], place + done)
        except OSError as error:
            self.failure = error
            raise
        self._at = end
        self.size = max(self.size, end)
        return len(view)

    def close(self) -> None:
        if not self.closed and not self.in_memory:
            os.close(self._descriptor)
        super().close()


class StagedFiles:
    """The files of one checkpoint in memory, by name; the memory is used again for the next one."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, mmap.mmap | None]] = {}

    def file(self, name: str) -> StateFile:
        """Returns the image of that name, to be overwritten; see `StateFile`."""
        descriptor, memory = self._held.get(name) or (os.memfd_create(f"hvdtrain {name}"), None)
        size = os.fstat(descriptor).st_size
        if size > (0 if memory is None else len(memory)):
            with contextlib.suppress(OSError):  # without: the descriptor is written to
                memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._held[name] = (descriptor, memory)
        mapped = None if memory is None else memoryview(memory)
        return StateFile(name, descriptor, mapped, in_memory=True)

    def descriptor(self, name: str) -> int:
        return self._held[name][0]


def write_image(descriptor: int, size: int, entry: tuple[str, int] | None, target: StateFile) -> None:
    """Writes an image's first `size` bytes to a file; or the archive that they are to become, see `StateFile`."""
    if entry is not None:
        _archive(descriptor, size, *entry, target)
    elif size:
        with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as memory, memoryview(memory) as view:
            target.write(view)


def _archive(descriptor: int, size: int, name: str, length: int, target: StateFile) -> None:
    with (
        mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as memory,
        memoryview(memory) as view,
        zipfile.ZipFile(io.BytesIO(view[length:])) as others,
        zipfile.ZipFile(target, "w") as archive,
    ):
        for other in others.infolist():
            archive.writestr(other, others.read(other))
        with archive.open(zipfile.ZipInfo(name, time.localtime()[:6]), "w", force_zip64=True) as entry:
            for begin in range(0, length, _CHUNK):
                with view[begin : min(begin + _CHUNK, length)] as chunk:
                    entry.write(chunk)
