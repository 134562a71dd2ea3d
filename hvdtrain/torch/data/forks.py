"""Worker processes that are forked again when they hang before their first line.

A forked process has one thread, but every lock as it was: what another thread held at that moment is never released.
Python up to 3.11.9 takes such a lock right after a fork (https://github.com/python/cpython/issues/112275), and a thread
from C++ holds it for a moment whenever it lets go of a tensor. Horovod's does so after each collective: of 4000
processes forked right after a small all-reduce 11 hung, and with one, all ranks. No lock of ours can keep such
threads away, so a process has to answer, and one that does not has run nothing yet: it can be ended and forked again.
"""

from __future__ import annotations

import multiprocessing.connection
import multiprocessing.context
import multiprocessing.popen_fork
import multiprocessing.process
from typing import Any

import torch
from torch.utils.data._utils import worker

from hvdtrain.core.errors import HvdtrainError

# A healthy process answers within milliseconds; on a machine that is very busy a later attempt waits for longer.
PATIENCE_S = (2.0, 4.0, 8.0, 16.0)


class _Watchdog(worker.ManagerWatchdog):
    """PyTorch's takes whoever is the parent when it begins for its parent: of one that was killed just before, a worker
    would wait for ever."""

    def __init__(self) -> None:
        super().__init__()
        parent = multiprocessing.process.parent_process()
        assert parent is not None and parent.pid is not None
        self.manager_pid = parent.pid


class Process(multiprocessing.context.ForkProcess):
    """A forked process that ran: `start` raises `HvdtrainError` when several in a row hung before their first line."""

    _answers: multiprocessing.connection.Connection

    def run(self) -> None:
        self._answers.send_bytes(b"")
        self._answers.close()
        vars(worker)["ManagerWatchdog"] = _Watchdog  # in this process only
        super().run()

    @staticmethod
    def _Popen(process: Any) -> multiprocessing.popen_fork.Popen:  # what `start` calls
        for patience in PATIENCE_S:
            answer, process._answers = multiprocessing.connection.Pipe(duplex=False)
            answered = False
            with answer:
                with process._answers:
                    forked = multiprocessing.popen_fork.Popen(process)
                try:
                    answered = answer.poll(patience)  # or it died at once, which whoever waits for it finds
                finally:  # Ctrl-C as well
                    if not answered:
                        forked.kill()
                        forked.wait()
                        forked.close()
            if answered:
                return forked
        raise HvdtrainError(
            "a forked worker process runs its first line at once",
            f"{len(PATIENCE_S)} of them hung, for {' s, '.join(f'{patience:g}' for patience in PATIENCE_S)} s: "
            "each time another thread of this process held a lock",
            'call torch.multiprocessing.set_start_method("forkserver") first, or read without workers (workers=0)',
        )


class WorkerContext(multiprocessing.context.ForkContext):
    """What a `DataLoader` starts its workers by."""

    Process = Process


def worker_context() -> WorkerContext | None:
    """Returns how to start workers; None where `torch.multiprocessing` is set to another way than a fork."""
    return WorkerContext() if torch.multiprocessing.get_start_method(allow_none=True) in (None, "fork") else None
