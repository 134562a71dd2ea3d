"""Worker processes that read: how they start, and the error when one is killed."""

from __future__ import annotations

import multiprocessing.connection
import multiprocessing.context
import multiprocessing.popen_fork
import multiprocessing.process
import multiprocessing.queues
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from hvdtrain.core.errors import ConfigError, HvdtrainError
from hvdtrain.core.version import add_note
from hvdtrain.private.torch import ExceptionWrapper, data_worker


@dataclass(frozen=True)
class Processes:
    """The settings of the processes that read a data set, or a stream."""

    count: int  # processes; 0 is none, this process reads
    pin_memory: bool = False  # batches are put into page-locked memory, for a GPU's own copies
    prefetch: int = 2  # batches that each process makes ahead
    init: Callable[[int], None] | None = None  # called in each process, with its number, before it reads

    def __post_init__(self) -> None:
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 1:
            raise ConfigError(
                "prefetch_factor must be >= 1, the number of batches that a worker reads ahead", f"{self.prefetch!r}"
            )


def _start(init: Callable[[int], None] | None, worker: int) -> None:
    """Prepares a worker process."""
    # else a thread prints the error, drops the answer, and the rank waits for ever
    multiprocessing.queues.Queue._on_queue_feeder_error = _send_why  # type: ignore[attr-defined]
    # Ctrl-C goes to the whole terminal group; the rank ends its workers itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if init is not None:
        init(worker)


class _Unsent(str):
    """The reason why an answer could not be pickled; sent in its place."""


def _send_why(queue: Any, error: Exception, item: Any) -> None:
    """Sends in place of an item that cannot be sent what can: an error's text, or why."""
    if not isinstance(item, tuple):
        return
    number, answer = item
    if isinstance(answer, ExceptionWrapper):
        answer.exc_type = RuntimeError  # its text names the class
    else:
        answer = _Unsent(f"{type(error).__name__}: {error}")
    queue.put((number, answer))


def _as_it_is(answer: Any) -> Any:
    return answer


def answers(reader: Any, processes: Processes, questions: Sequence[Any] | None = None) -> Generator[Any, None, None]:
    """Yields `reader[question]` for each question, in order; of an iterable reader (no questions) what iterating over
    it gives."""
    mine = os.getpid()
    with _explained():
        found = iter(_data_loader(reader, processes, questions))
    try:
        while True:
            with _explained():
                try:
                    answer = next(found)
                except StopIteration:
                    return
            if isinstance(answer, _Unsent):
                raise ConfigError(
                    "batches of worker processes must be picklable",
                    f"pickle fails on a batch, or on a part of a batch: {answer}",
                    "remove functions, open files, locks and local classes from batches; or workers=0",
                )
            yield answer
    finally:
        if os.getpid() != mine:
            # a process that was forked in between has all this too, but none of the workers
            found._shutdown = True  # type: ignore[attr-defined]
        elif hasattr(found, "_shutdown_workers"):
            found._shutdown_workers()  # what it does itself when it is collected, but at a known time


def _data_loader(reader: Any, processes: Processes, questions: Sequence[Any] | None) -> DataLoader[Any]:
    count = processes.count
    return DataLoader(
        reader,
        batch_size=None,  # the reader makes whole batches
        sampler=questions,
        collate_fn=_as_it_is,
        num_workers=count,
        multiprocessing_context=worker_context() if count else None,
        worker_init_fn=partial(_start, processes.init),
        pin_memory=processes.pin_memory,
        prefetch_factor=processes.prefetch if count else None,
        generator=torch.Generator(),  # else each pass draws from the stream that dropout uses
    )


@contextmanager
def _explained() -> Iterator[None]:
    """Explains a worker that was killed, by the out-of-memory killer or for want of shared memory. An error that the
    data set raised in a worker is passed on as it is."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not text.startswith("DataLoader worker (pid"):
            raise
        raise HvdtrainError(
            "a worker process of the loader must not end before the training",
            text.strip().splitlines()[-1],
            "look for the out-of-memory killer in the kernel's log, and use fewer workers (workers=...);\n"
            "in a container make /dev/shm larger (docker run --shm-size=8g, or --ipc=host)",
        ) from error


def located(where: str, make: Callable[..., Any], *given: Any) -> Any:
    """Returns `make(*given)`; adds to an error the place in the data where it arose. A `StopIteration` becomes a
    `RuntimeError`: the code that asks for batches would take it for their end."""
    try:
        try:
            return make(*given)
        except StopIteration as error:
            raise RuntimeError("StopIteration was raised, which is no end of the data here") from error
    except Exception as error:
        add_note(error, f"hvdtrain: {where}")
        raise


# ---- worker processes that are forked again when they hang before their first line
#
# A forked process has one thread, but every lock as it was: what another thread held at that moment is never released.
# Python up to 3.11.9 takes such a lock right after a fork (https://github.com/python/cpython/issues/112275), and a
# thread from C++ holds it for a moment whenever it lets go of a tensor. Horovod's does so after each collective: of
# 4000 processes forked right after a small all-reduce 11 hung, and with one, all ranks. No lock of ours can keep such
# threads away, so a process has to answer, and one that does not has run nothing yet: it is killed and forked again.

# A healthy process answers within milliseconds; on a machine that is very busy a later attempt waits for longer.
PATIENCE_S = (2.0, 4.0, 8.0, 16.0)


class _Watchdog(data_worker.ManagerWatchdog):
    """A watchdog of a worker's real parent: PyTorch's takes for it whatever process is the parent when it begins,
    and of one that was killed just before, a worker would wait forever."""

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
        vars(data_worker)["ManagerWatchdog"] = _Watchdog  # in this process only
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
            "a forked worker process did not start",
            f"{len(PATIENCE_S)} processes hung, for {' s, '.join(f'{patience:g}' for patience in PATIENCE_S)} s:\n"
            "each time another thread of this process held a lock",
            'call torch.multiprocessing.set_start_method("forkserver") first, or read without workers (workers=0)',
        )


class WorkerContext(multiprocessing.context.ForkContext):
    """The context from which a `DataLoader` starts its workers."""

    Process = Process


def worker_context() -> WorkerContext | None:
    """Returns how to start workers; None where `torch.multiprocessing` is set to another way than a fork."""
    return WorkerContext() if torch.multiprocessing.get_start_method(allow_none=True) in (None, "fork") else None
