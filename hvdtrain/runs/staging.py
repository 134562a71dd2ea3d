"""What a part of a checkpoint writes its state to: a file on disk, or an image of it in memory that another process
can read (Linux' memfd: it has no name, so that nothing is left of it when a process is killed).

Images are kept and written over: memory that a process has touched before takes a copy at the speed of memory, which
fresh pages do not (400 MB: 0.02 s and 0.2 to 0.5 s on a virtual machine).
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
from pathlib import Path
from typing import Any


class StateFile(io.RawIOBase):
    """A file to write to, with `seek` and `tell`.

    Args:
        name: of the part; also what `str` gives, as Keras looks there for ".keras".
        descriptor: stays open when this is closed, if `mapped` is given.
        mapped: the memory of the file's first bytes.

    Attributes:
        size: bytes so far.
        failure: what the operating system said when it could not write: libraries tell it in words of their own.
    """

    def __init__(self, name: str, descriptor: int, mapped: memoryview | None = None, *, owned: bool = True) -> None:
        self._name, self._descriptor, self._owned = name, descriptor, owned
        self._mapped = mapped if mapped is not None else memoryview(b"")
        self._at = self.size = 0
        self.failure: OSError | None = None

    @classmethod
    def on_disk(cls, path: Path) -> StateFile:
        """Makes a file, with the permissions that the umask gives."""
        return cls(path.name, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    @property
    def path(self) -> str:
        """Where this process can read what was written, until it is closed."""
        return f"/proc/self/fd/{self._descriptor}"

    def __str__(self) -> str:
        return self._name

    def fileno(self) -> int:
        return self._descriptor

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def write(self, data: Any) -> int:
        """Writes all of `data`; returns its bytes.

        Raises:
            OSError: there is no room.
        """
        given = memoryview(data)
        view = given.cast("B") if given.nbytes else memoryview(b"")
        mapped = min(max(len(self._mapped) - self._at, 0), len(view))
        if mapped:
            self._mapped[self._at : self._at + mapped] = view[:mapped]
        done = mapped
        try:
            while done < len(view):
                done += os.pwrite(self._descriptor, view[done:], self._at + done)
        except OSError as error:
            self.failure = error
            raise
        self._at += done
        self.size = max(self.size, self._at)
        return done

    def close(self) -> None:
        if not self.closed and self._owned:
            os.close(self._descriptor)
        super().close()


class Images:
    """The files of one checkpoint in memory, by name; the memory is used again for the next one."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, mmap.mmap | None]] = {}

    def file(self, name: str) -> StateFile:
        """Returns the image of that name, to be written anew; see `StateFile`."""
        descriptor, memory = self._held.get(name) or (os.memfd_create(f"hvdtrain {name}"), None)
        size = os.fstat(descriptor).st_size
        if size > (0 if memory is None else len(memory)):
            with contextlib.suppress(OSError):  # without: the descriptor is written to
                memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._held[name] = (descriptor, memory)
        return StateFile(name, descriptor, None if memory is None else memoryview(memory), owned=False)

    def descriptor(self, name: str) -> int:
        return self._held[name][0]


def copy_image(descriptor: int, size: int, target: StateFile) -> None:
    """Writes an image's first `size` bytes to a file."""
    if size:
        with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as memory, memoryview(memory) as view:
            target.write(view)
