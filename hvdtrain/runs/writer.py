"""The process that writes checkpoints while training goes on: one for each process that saves.

It is given images of the files (`hvdtrain.runs.staging`), which it finishes writing even when the process that trains
is killed, and imports no framework. Signals that end a job are the trainer's to act on: when that has gone, and the
last image is on disk, it ends.

    trainer -> writer   {"directory": ..., "name": ..., "files": {name: size}, ...} and the files' descriptors
    writer -> trainer   {"seconds": ...} or {"failure": [rule, received, remedy]}
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.core.errors import EXIT_CODE, CheckpointError, before_end, describe
from hvdtrain.runs.checkpoint_folder import Folder, Written, name_of, read_info
from hvdtrain.runs.parts import Progress
from hvdtrain.runs.staging import Images, copy_image

_LONGEST_MESSAGE = 1 << 17
_MOST_FILES = 64
_PATIENCE_S = 60.0  # of a program that ends in need
_ALONE_S = 2.0  # a child that the trainer has forked may hold its end of the socket open
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
_MAIN = "from hvdtrain.runs.writer import serve; serve({descriptor}, {parent})"


@dataclass
class _Job:
    path: Path  # absolute
    images: Images


class Writer:
    """The trainer's side. One checkpoint is being written at most, and one waits."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._free = [Images(), Images()]
        self._under_way: deque[_Job] = deque()
        self._failures: dict[Path, CheckpointError] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        before_end(self._finish)
        atexit.register(self._at_exit)

    @property
    def own(self) -> bool:
        """Whether it is this process's: a forked child has a copy."""
        return self._pid == os.getpid()

    def start(self) -> None:
        """Starts the process, unless it lives.

        Raises:
            OSError: it cannot be started.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self._settle(0)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN.format(descriptor=theirs.fileno(), parent=os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._socket = ours

    def images(self) -> Images:
        """Returns memory for a checkpoint; waits until there is some."""
        self._settle(1)
        return self._free[-1]

    def submit(self, images: Images, sizes: Mapping[str, int], folder: Folder, written: Written) -> Path:
        """Has a checkpoint written from images; returns its directory, which will be there.

        Raises:
            OSError: the process is gone.
        """
        assert self._socket is not None
        directory = folder.directory.absolute()
        taken = [job.path.name for job in self._under_way if job.path.parent == directory]
        name = folder.free_name(name_of(written.progress), taken)
        message = {
            "directory": os.fspath(directory), "keep": folder.keep, "best_metric": folder.best_metric,
            "mode": folder.mode, "name": name, "files": dict(sizes), "written": asdict(written),
        }  # fmt: skip
        socket.send_fds(self._socket, [json.dumps(message).encode()], [images.descriptor(part) for part in sizes])
        self._free.remove(images)
        self._under_way.append(_Job(directory / name, images))
        return folder.directory / name

    def wait(self, directory: Path) -> None:
        """Waits until all checkpoints of that directory are written, or failed."""
        while any(job.path.parent == directory.absolute() for job in self._under_way):
            self._settle(len(self._under_way) - 1)

    def check(self, directory: Path) -> None:
        """Raises what an earlier write into that directory failed with, once.

        Raises:
            CheckpointError: as `Folder.add`; or the process was killed.
        """
        self._settle(len(self._under_way))
        failure = self._failures.pop(directory.absolute(), None)
        if failure is not None:
            raise failure

    def _settle(self, most: int, patience_s: float | None = None) -> None:
        """Takes answers until no more than `most` checkpoints are under way; then those that are there already.

        Raises:
            TimeoutError: one has not come within `patience_s`.
        """
        while self._under_way:
            assert self._socket is not None and self._process is not None
            self._socket.settimeout(patience_s if len(self._under_way) > most else 0)
            try:
                answer = self._socket.recv(_LONGEST_MESSAGE)
            except BlockingIOError:
                return
            except ConnectionError:
                answer = b""
            job = self._under_way.popleft()
            self._free.append(job.images)
            if answer:
                failure = json.loads(answer).get("failure")
            else:
                failure = None if read_info(job.path).ok else _died(self._process, job.path)
            if failure is not None:
                self._failures[job.path.parent] = CheckpointError(*failure)

    def _finish(self, patience_s: float | None = _PATIENCE_S) -> None:
        """The last checkpoint is waited for, and said if it failed."""
        if not self.own or self._socket is None or self._process is None:
            return
        try:
            self._settle(0, patience_s)
        except TimeoutError:  # it goes on alone
            print(f"hvdtrain: {self._under_way[0].path} is still being written", file=sys.stderr, flush=True)
            return
        self._socket.close()
        self._process.wait()
        self._socket = self._process = None
        for failure in self._failures.values():
            print(describe("hvdtrain", failure, 0), file=sys.stderr, flush=True)

    def _at_exit(self) -> None:
        """A program that lost its last checkpoint does not end as one that went well."""
        self._finish(None)
        if self.own and self._failures:
            os._exit(EXIT_CODE)  # nothing else gives a code here


def _died(process: subprocess.Popen[bytes], path: Path) -> list[str]:
    code = process.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return [
        "a checkpoint must be written whole",
        f"{path}: the process that wrote it {how}",
        "earlier checkpoints are untouched; SIGKILL may be the kernel's, for want of memory:"
        " Checkpointer(..., asynchronous=False) takes none besides",
    ]


_writer: Writer | None = None


def running() -> Writer | None:
    """Returns this process's writer, if it has been started."""
    return _writer if _writer is not None and _writer.own else None


def started() -> Writer:
    """Returns this process's writer.

    Raises:
        OSError: it cannot be started.
    """
    global _writer
    _writer = running() or Writer()
    _writer.start()
    return _writer


# -- in the process itself -----------------------------------------------------------------------------------------
def serve(descriptor: int, parent: int) -> None:
    """Writes what comes, until the parent is gone."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as link:
        link.settimeout(_ALONE_S)
        folders: dict[tuple[Any, ...], Folder] = {}
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(link, _LONGEST_MESSAGE, _MOST_FILES)
            except TimeoutError:
                if os.getppid() != parent:
                    return
                continue
            except ConnectionError:  # the trainer went before it read an answer; what it sent before is still to come
                continue
            if not data:
                return
            message = json.loads(data)
            options = (Path(message["directory"]), message["keep"], message["best_metric"], message["mode"])
            answer = _written(message, descriptors, folders.setdefault(options, Folder(*options)))
            with contextlib.suppress(ConnectionError):  # what was to be written is written, whoever wants to know
                link.send(json.dumps(answer).encode())


def _written(message: dict[str, Any], descriptors: list[int], folder: Folder) -> dict[str, Any]:
    started = time.perf_counter()
    written = Written(**message["written"] | {"progress": Progress(**message["written"]["progress"])})
    images = zip(message["files"].items(), descriptors, strict=True)
    try:
        folder.add(written, message["name"], {name: partial(copy_image, fd, size) for (name, size), fd in images})
    except CheckpointError as error:
        return {"failure": [error.rule, error.received, error.remedy]}
    except Exception as error:  # the trainer is to know, whatever it is
        return {"failure": ["a checkpoint must be written whole", f"{type(error).__name__}: {error}"]}
    finally:
        for fd in descriptors:
            os.close(fd)
    return {"seconds": time.perf_counter() - started}
