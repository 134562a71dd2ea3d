"""What a part of a checkpoint writes its state to: a file on disk, or an image of it in memory that another process
can read (Linux' memfd: it has no name, so that nothing is left of it when a process is killed).

Images are kept and written over: memory that a process has touched before takes a copy at the speed of memory, which
fresh pages do not (400 MB: 0.02 s and 0.2 to 0.5 s on a virtual machine).

The image of a zip archive can leave the archive to whoever writes it to disk: checksums of its entries take as long as
to write them.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import mmap
import os
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WORDS = 512  # of 8 bytes, in a row of what is summed up to be compared
_ROWS = 256  # at once: they stay in the processor's cache
_CHUNK = 1 << 20  # does, too


@dataclass(frozen=True)
class Share:
    """Which bytes of a file are written here: each `size`-th stripe of it, from the `index`-th on."""

    index: int = 0
    size: int = 1
    stripe_bytes: int = 1 << 40

    def own(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Gives the own ranges between two places, in order."""
        for stripe in range(begin // self.stripe_bytes, -(-end // self.stripe_bytes)):
            if stripe % self.size == self.index:
                yield max(begin, stripe * self.stripe_bytes), min(end, (stripe + 1) * self.stripe_bytes)

    def packed(self, place: int) -> int:
        """Returns where an own place is when the own stripes alone stand one behind the other."""
        stripe, within = divmod(place, self.stripe_bytes)
        return stripe // self.size * self.stripe_bytes + within


ALL = Share()


class StateFile(io.RawIOBase):
    """A file to write to, with `seek` and `tell`.

    Args:
        name: of the part; also what `str` gives, as Keras looks there for ".keras".
        descriptor: stays open when this is closed, if not `owned`.
        mapped: the memory of the file's first bytes.
        share: what is kept of that which is written.
        packed: only that is in the file, one stripe behind the other; else it has holes for the others'.

    Attributes:
        size: bytes so far.
        compared: has a digest, where it is one of several ranks'.
        entry: the name and length of what the file begins with, where that is to be an entry of a zip archive; what
            follows it is an archive of the other entries.
        failure: what the operating system said when it could not write: libraries tell it in words of their own.
    """

    def __init__(
        self,
        name: str,
        descriptor: int,
        mapped: memoryview | None = None,
        *,
        owned: bool = True,
        share: Share = ALL,
        packed: bool = False,
    ) -> None:
        self._name, self._descriptor, self._owned = name, descriptor, owned
        self._mapped = mapped if mapped is not None else memoryview(b"")
        self._packed = packed
        self._noted = hashlib.blake2b(digest_size=16)
        self._at = self.size = 0
        self.share = share
        self.compared = True
        self.entry: tuple[str, int] | None = None
        self.failure: OSError | None = None

    @classmethod
    def on_disk(cls, path: Path, share: Share = ALL, *, made: bool = False) -> StateFile:
        """Makes a file, with the permissions that the umask gives; or opens one that is `made`."""
        how = os.O_RDWR | os.O_CLOEXEC | (0 if made else os.O_CREAT | os.O_EXCL)
        return cls(path.name, os.open(path, how, 0o666), share=share)

    @property
    def in_memory(self) -> bool:
        """Whether it is an image, which another process writes to disk."""
        return self._packed

    @property
    def digest(self) -> str:
        """Of all that was written. Who writes a share of a file has to know that all others write shares of the same
        one."""
        return f"{self.size}-{self._noted.hexdigest()}"

    def note(self, data: Any) -> None:
        """Has the digest depend on every byte of `data`."""
        self._noted.update(data)

    @property
    def path(self) -> str:
        """Where this process can read what was written, until it is closed."""
        return f"/proc/self/fd/{self._descriptor}"

    def __str__(self) -> str:
        return self._name

    def fileno(self) -> int:
        return self._descriptor

    def readable(self) -> bool:
        return self._packed

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
        """Writes all of `data`; returns its bytes.

        Raises:
            OSError: there is no room.
        """
        given = memoryview(data)
        view = given.cast("B") if given.nbytes else memoryview(b"")
        begin, end = self._at, self._at + len(view)
        if self.share.size > 1 and self.compared:
            self.note(f"{begin} {end} ".encode())
            for part in _sums(view):
                self.note(part)
        for first, last in self.share.own(begin, end):
            self._put(view[first - begin : last - begin], self.share.packed(first) if self._packed else first)
        self._at = end
        self.size = max(self.size, end)
        return len(view)

    def _put(self, view: memoryview, place: int) -> None:
        done = min(max(len(self._mapped) - place, 0), len(view))
        if done:
            self._mapped[place : place + done] = view[:done]
        try:
            while done < len(view):
                done += os.pwrite(self._descriptor, view[done:], place + done)
        except OSError as error:
            self.failure = error
            raise

    def close(self) -> None:
        if not self.closed and self._owned:
            os.close(self._descriptor)
        super().close()


def _sums(view: memoryview) -> Iterator[Any]:
    """Gives what bytes are compared by: short ones themselves; of long ones the sums of rows and columns, which takes
    as long as to read them. A value that stands elsewhere changes them, too."""
    import numpy as np  # which the process that writes does without

    long = len(view) // (8 * _WORDS) * 8 * _WORDS
    words = np.frombuffer(view[:long], np.uint64).reshape(-1, _WORDS)
    for begin in range(0, len(words), _ROWS):
        rows = words[begin : begin + _ROWS]
        yield rows.sum(1)
        yield rows.sum(0)
    yield view[long:]


class Images:
    """The files of one checkpoint in memory, by name; the memory is used again for the next one."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, mmap.mmap | None]] = {}

    def file(self, name: str, share: Share = ALL) -> StateFile:
        """Returns the image of that name, to be written anew; see `StateFile`."""
        descriptor, memory = self._held.get(name) or (os.memfd_create(f"hvdtrain {name}"), None)
        size = os.fstat(descriptor).st_size
        if size > (0 if memory is None else len(memory)):
            with contextlib.suppress(OSError):  # without: the descriptor is written to
                memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._held[name] = (descriptor, memory)
        mapped = None if memory is None else memoryview(memory)
        return StateFile(name, descriptor, mapped, owned=False, share=share, packed=True)

    def descriptor(self, name: str) -> int:
        return self._held[name][0]


def write_image(descriptor: int, size: int, entry: tuple[str, int] | None, target: StateFile) -> None:
    """Writes what an image has of a file of `size` bytes, `target`'s share of it, there; or the archive that it is to
    become, see `StateFile`."""
    if entry is not None:
        _archive(descriptor, size, *entry, target)
        return
    own = list(target.share.own(0, size))
    target.size = size  # of which the last bytes may be another's
    target.compared = False  # the images were
    if not own:
        return
    length = target.share.packed(own[-1][1] - 1) + 1
    with mmap.mmap(descriptor, length, access=mmap.ACCESS_READ) as memory, memoryview(memory) as view:
        for begin, end in own:
            target.seek(begin)
            place = target.share.packed(begin)
            with view[place : place + end - begin] as stripe:
                target.write(stripe)


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
