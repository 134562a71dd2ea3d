"""The process that writes checkpoints while training continues: one for each process that saves.

It receives images of the files (`hvdtrain.checkpoint.staging`), and finishes writing them even if the training process
is killed. It imports no framework. Signals that end a job do not reach it: the training process acts on them. It ends
when that process is gone and the last image is on disk.

    trainer -> writer   {"directory": ..., "name": ..., "files": {name: size}, ...} and the descriptors of the files
    writer -> trainer   {} or {"failure": [rule, received, remedy]}
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.checkpoint_folder import CheckpointFolder, read_info
from hvdtrain.checkpoint.staging import StagedFiles, StateFile, write_image
from hvdtrain.core.errors import EXIT_CODE, CheckpointError, before_end, describe, ends_badly, note_exits
from hvdtrain.core.version import SAFE_PATH

_LONGEST_MESSAGE = 1 << 17
_MOST_FILES = 64
_PATIENCE_S = 60.0  # of a program that ends in need
_ALONE_S = 2.0  # a child that the trainer has forked may hold its end of the socket open
_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
MAIN = "from hvdtrain.checkpoint.writer import serve; serve({descriptor}, {parent})"

Noted = Callable[[Path | None], object]  # is called with a checkpoint that is complete, or None, by any thread


@dataclass
class _Job:
    folder: CheckpointFolder
    path: Path
    message: bytes
    descriptors: list[int]  # of the images
    images: StagedFiles
    noted: Noted | None = None
    sent: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


class Writer:
    """The trainer's side. One checkpoint is being written at most, and one waits.

    Threads talk with the process: an interrupt, which only the main thread can have, loses no answer and no image.
    """

    main = MAIN  # of the process

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._images = [StagedFiles(), StagedFiles()]
        self._jobs: list[_Job] = []  # whose checkpoints are not there yet; in order
        self._new: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._sent: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._failures: dict[Path, list[CheckpointError]] = {}
        note_exits()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.lock = threading.RLock()  # of who saves
        for run in (self._send, self._receive):
            threading.Thread(target=run, name="hvdtrain writer", daemon=True).start()
        before_end(self._finish)
        atexit.register(self._at_exit)

    @property
    def own(self) -> bool:
        """Returns True if this process made the writer: a forked child has a copy."""
        return self._pid == os.getpid()

    def start(self) -> None:
        """Starts the process unless it lives; raises OSError."""
        if self._process is not None and self._process.poll() is None:
            return
        self.wait()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = self._started(theirs)
        self._socket = ours

    def _started(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        # a signal to this rank is not meant for it, not even while it starts; nor is SIGKILL to the rank's group
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            return subprocess.Popen(
                [sys.executable, *SAFE_PATH, "-c", self.main.format(descriptor=theirs.fileno(), parent=os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def wait_for_room(self) -> None:
        """Waits until there is memory for one more checkpoint."""
        while len(self._jobs) > 1:
            first = self._jobs[0]
            if not first.done.wait(_PATIENCE_S):
                print(f"hvdtrain: training waits for {first.path}, which is still being written: a disk that does not"
                      " answer, or its process is stopped", file=sys.stderr, flush=True)  # fmt: skip

    def images(self) -> StagedFiles:
        """Returns memory for a checkpoint; waits until there is some."""
        self.wait_for_room()
        in_use = [job.images for job in self._jobs]
        return next(images for images in self._images if images not in in_use)

    def submit(
        self,
        images: StagedFiles,
        files: Mapping[str, StateFile],
        folder: CheckpointFolder,
        name: str,
        facts: dict[str, Any],
        *,
        noted: Noted | None = None,
    ) -> Path:
        """Has a checkpoint written from images; returns its directory, which will be there."""
        taken = [job.path.name for job in self._jobs if job.folder.directory == folder.directory]
        name = folder.free_name(name, taken)
        message = {
            "directory": os.fspath(folder.directory), "keep": folder.keep, "best_metric": folder.best_metric,
            "mode": folder.mode, "training": folder.training, "name": name, "facts": facts,
            "files": {part: [file.size, file.entry] for part, file in files.items()},
        }  # fmt: skip
        descriptors = [images.descriptor(part) for part in files]
        path = folder.directory / name
        job = _Job(folder, path, json.dumps(message).encode(), descriptors, images, noted)
        self._jobs.append(job)  # an interrupt from here on finds its images in use
        self._new.put(job)
        job.sent.wait()  # from here on it is written, even if this process is killed
        return job.path

    def wait(self, directory: Path | None = None) -> None:
        """Waits until all checkpoints of that directory, or of all, are written, or failed."""
        for job in list(self._jobs):
            if directory is None or directory.resolve() == job.folder.directory:
                job.done.wait()

    def check(self, directory: Path) -> None:
        """Raises what earlier writes into that directory failed with, once (CheckpointError)."""
        directory = directory.resolve()
        if directory in self._failures and self._process is not None and self._process.poll() is not None:
            self.wait(directory)  # jobs that waited for a killed process are lost with it, and reported with it
        failures = self._failures.pop(directory, [])
        if failures:
            lost = "\n".join(failure.received for failure in failures)
            raise CheckpointError(failures[0].rule, lost, failures[0].remedy)

    def _send(self) -> None:
        """Hands the process each job at once: it is to finish all when this process is killed."""
        while True:
            job = self._new.get()
            assert self._socket is not None
            with contextlib.suppress(OSError):  # it is gone: no answer will come
                socket.send_fds(self._socket, [job.message], job.descriptors)
            job.sent.set()
            self._sent.put(job)

    def _receive(self) -> None:
        while True:
            job = self._sent.get()
            assert self._socket is not None and self._process is not None
            answer = b""
            with contextlib.suppress(OSError):
                answer = self._socket.recv(_LONGEST_MESSAGE)
            if answer:
                failure = json.loads(answer).get("failure")
            else:
                failure = None if read_info(job.path).ok else _died(self._process)
            if failure is not None:
                rule, received, remedy = failure
                failed = CheckpointError(rule, f"{job.path}: {received}", remedy)
                self._failures.setdefault(job.folder.directory, []).append(failed)
            if job.noted is not None:
                job.noted(job.path if failure is None else None)
            self._jobs.remove(job)
            job.done.set()

    def _finish(self, patience_s: float | None = _PATIENCE_S) -> None:
        """Waits for the writer and ends it; prints which checkpoints failed or are still being written."""
        if not self.own or self._socket is None or self._process is None:
            return
        for job in list(self._jobs):
            if not job.done.wait(patience_s):  # it continues alone
                print(f"hvdtrain: {job.path} is still being written", file=sys.stderr, flush=True)
                return
        self._socket.shutdown(socket.SHUT_RDWR)  # a process that was forked and lives (a data worker) holds it open
        self._socket.close()
        self._process.wait()
        self._socket = self._process = None
        for failure in itertools.chain.from_iterable(self._failures.values()):
            print(describe("hvdtrain", failure, 0), file=sys.stderr, flush=True)

    def _at_exit(self) -> None:
        """Ends a program that lost its last checkpoint with an error code, unless the program fails anyway."""
        self._finish(None)
        if self.own and self._failures and not ends_badly():
            os._exit(EXIT_CODE)  # nothing else gives a code here


def _died(process: subprocess.Popen[bytes]) -> list[str]:
    code = process.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return [
        "a checkpoint must be written whole",
        f"the process that wrote it {how}",
        "earlier checkpoints are unchanged; if the kernel sent SIGKILL because memory ran out:"
        " Checkpointer(..., asynchronous=False) needs no extra memory",
    ]


_writer: Writer | None = None
_MAKING = threading.Lock()


def running() -> Writer | None:
    """Returns this process's writer, if it has been started."""
    return _writer if _writer is not None and _writer.own else None


def started() -> Writer:
    """Returns this process's writer, to be started."""
    global _writer
    with _MAKING:
        _writer = running() or Writer()
    return _writer


# -- in the process itself -----------------------------------------------------------------------------------------
def serve(descriptor: int, parent: int) -> None:
    """Writes what comes, until the parent is gone."""
    with socket.socket(fileno=descriptor) as link:
        link.settimeout(_ALONE_S)
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
            answer = _written(json.loads(data), descriptors)
            with contextlib.suppress(ConnectionError):  # the checkpoint is written, even if no process reads the answer
                link.send(json.dumps(answer).encode())


def _written(message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
    kept = (message["keep"], message["best_metric"], message["mode"], message["training"])
    folder = CheckpointFolder(Path(message["directory"]), *kept)
    files = {
        name: partial(write_image, descriptor, size, entry)
        for (name, (size, entry)), descriptor in zip(message["files"].items(), descriptors, strict=True)
    }
    try:
        folder.add(message["facts"], message["name"], files)
    except CheckpointError as error:
        return {"failure": [error.rule, error.received, error.remedy]}
    except Exception as error:  # the trainer is to know, whatever it is
        return {"failure": ["a checkpoint must be written whole", f"{type(error).__name__}: {error}", ""]}
    finally:
        for fd in descriptors:
            os.close(fd)
    return {}
