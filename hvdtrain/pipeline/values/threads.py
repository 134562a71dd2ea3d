"""Threads that work side by side, with the settings of the calling thread, and last from call to call."""

from __future__ import annotations

import atexit
import contextvars
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import torch

from hvdtrain.core.errors import ConfigError
from hvdtrain.private.torch import (
    DeviceContext,
    dispatch_modes,
    function_modes,
    profiler_enabled,
    top_saved_tensors_hooks,
)


class Context:
    """The settings of the calling thread: gradients, autocast, context variables, hooks of saved tensors, device. With
    `threads`, refuses `torch` modes that only the calling thread would be in (a FLOP counter)."""

    def __init__(self, *, threads: bool) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        kinds = ["cpu"] + ["cuda"] * torch.cuda.is_available()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in kinds
            if torch.is_autocast_enabled(kind)
        ]
        self._threads = threads
        modes = [*function_modes(), *dispatch_modes()] if threads else []
        if any(isinstance(mode, OwnMode) for mode in modes):
            raise ConfigError(
                "a pipeline cannot work inside of another one, whose stages wait for each other",
                "a call in the loss, or in a module, of another pipeline",
                "call it before that pipeline's step, and give the loss its result",
            )
        self._devices = [mode.device for mode in modes if isinstance(mode, DeviceContext)]
        self._variables = contextvars.copy_context()
        self._saving = top_saved_tensors_hooks(True) if threads else None
        if others := ", ".join(type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)):
            raise ConfigError(
                "the stages of a pipeline work in threads of their own, which this mode does not reach",
                f"a call inside of {others}",
                "leave the mode out; or look at the unsplit model, or at a pipeline of one device, with it",
            )
        if threads and profiler_enabled():
            warnings.warn(
                "torch.profiler sees only the thread that started it, not the stages of a pipeline, unless it was given"
                " experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)",
                stacklevel=4,
            )

    def run(self, work: Callable[[], None]) -> None:
        """Runs it as the calling thread would; in any thread."""
        if self._threads:
            self._variables.copy().run(self._run, work)
        else:
            self._run(work)

    def _run(self, work: Callable[[], None]) -> None:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            if self._threads:
                for device in self._devices:
                    stack.enter_context(device)
                if self._saving is not None:
                    stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saving))
            work()

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Autocasts each forward pass, not the thread: weights cast for one pass may not be kept for another."""
        with ExitStack() as stack:
            for kind, dtype, cache in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            yield


class OwnMode:
    """Marks a mode that a pipeline sets while it works."""


Work = Callable[[], object]


class Crew:
    """Threads that do what they are given, each always the same one, and wait for more. What PyTorch and its libraries
    keep for a thread (plans of cuDNN, OpenMP's own threads) lasts as long as they do.

    They end with `close`, or by themselves after the last reference to the crew: the garbage collector, which may have
    interrupted `Thread.start` while that holds a lock of all threads, must not wait for a thread.
    """

    def __init__(self, name: str) -> None:
        self._name, self._process = name, os.getpid()
        self._executors: list[ThreadPoolExecutor] = []
        # after an interrupted `Thread.start` nobody knows whether there will be a thread: each says that it is there
        self._threads: list[tuple[_At, threading.Thread]] = []

    @property
    def is_here(self) -> bool:
        """Returns True if it can take work: a forked process has no crew."""
        return self._process == os.getpid()

    def run(self, works: Sequence[Work], stop: Callable[[], None]) -> None:
        """Does each work in a thread of its own, until all have ended; works must not raise.

        Calls `stop`, which makes works that wait for others end, when this thread is interrupted or Python can start no
        thread (RuntimeError); raises that when works and threads have ended.
        """
        futures: list[Future[object]] = []
        try:
            for index, work in enumerate(works):
                if index == len(self._executors):
                    # its thread keeps the list, not the crew
                    self._executors.append(ThreadPoolExecutor(1, f"{self._name} {index}", _enter, (self._threads,)))
                futures.append(self._executors[index].submit(work))
            wait(futures)
        except BaseException:
            surely([stop, partial(wait, futures), self.close])
            raise

    def close(self) -> None:
        """The threads end; may be called twice. No work may be under way."""
        executors, self._executors = self._executors, []
        if self._process != os.getpid():
            return
        for executor in executors:
            executor.shutdown(wait=False, cancel_futures=True)
        for at, thread in self._threads:  # one that begins now is added, and comes last
            thread.join()
            _until_gone(at)
        self._threads = []


_At = tuple[int, str]  # the system's number of a thread, which comes again, and when it started
_started: set[_At] = set()


def _enter(threads: list[tuple[_At, threading.Thread]]) -> None:
    number = threading.get_native_id()
    at = number, _since(number)
    threads.append((at, threading.current_thread()))
    _started.difference_update([one for one in list(_started) if _since(one[0]) != one[1]])
    _started.add(at)


def _since(number: int) -> str:
    try:
        return Path(f"/proc/self/task/{number}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _until_gone(at: _At) -> None:
    """Waits until a thread that has done its work is gone from the system as well.

    Before Python 3.13 `join` returns a moment earlier (CPython issue 110829). In that moment PyTorch takes the thread's
    own Python objects back, for which it needs the interpreter: if that has already ended, the process aborts.
    """
    while _since(at[0]) == at[1]:
        os.sched_yield()


@atexit.register  # Python has then joined the threads of all executors
def _until_all_are_gone() -> None:
    for at in list(_started):
        _until_gone(at)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, in which parts of PyTorch and Python are replaced; a second one acts."""
    handler, came = signal.getsignal(signal.SIGINT), list[int]()
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def surely(acts: Sequence[Callable[[], object]]) -> None:
    """Does every act (which may be done twice), in order, and raises an interruption only afterwards."""
    pending, interrupted = list(acts), None
    while pending:
        try:
            while pending:
                pending[0]()
                pending.pop(0)
        except KeyboardInterrupt as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted
