"""Threads that work side by side and are gone when the call returns, also after Ctrl-C at any moment."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue


def side_by_side(works: Sequence[Callable[[], None]], name: str, stop: Callable[[], None]) -> None:
    """Runs each in a thread of its own, until all have ended.

    Args:
        works: they must not raise.
        name: of the threads; their number follows.
        stop: makes works that wait for others end; called when this thread is interrupted or no thread can be had.

    Raises:
        BaseException: what interrupted this thread.
        RuntimeError: Python's, that no thread can be started. Works that had begun have ended by then.
    """
    crew = _Crew(len(works))
    waiting = [
        # daemons: one that has not begun when this thread is interrupted keeps nobody
        threading.Thread(target=crew.work, args=(work,), name=f"{name} {index}", daemon=True)
        for index, work in enumerate(works)
    ]
    failure: BaseException | None = None
    stopped = False
    while True:
        try:
            while waiting and failure is None:
                waiting[0].start()
                waiting.pop(0)
            if failure is not None and not stopped:
                crew.close()
                stop()
                stopped = True
            while not crew.has_ended():
                crew.news.get()  # not join(): interrupted, it takes its thread for ended (CPython issue 90882)
            for thread in crew.begun:
                join_thread(thread)
            break
        except BaseException as error:
            failure = failure or error
    if failure is not None:
        raise failure


class _Crew:
    """Which threads have begun: after an interrupted `Thread.start` nobody knows whether there will be one."""

    def __init__(self, size: int) -> None:
        self.begun: list[threading.Thread] = []
        self.news: SimpleQueue[None] = SimpleQueue()
        self._size, self._ended, self._closed = size, 0, False
        self._lock = threading.Lock()

    def work(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                return
            self.begun.append(threading.current_thread())
        try:
            work()
        finally:
            with self._lock:
                self._ended += 1
            self.news.put(None)

    def close(self) -> None:
        """Who has not begun will not."""
        with self._lock:
            self._closed = True

    def has_ended(self) -> bool:
        with self._lock:
            return self._ended == (len(self.begun) if self._closed else self._size)


def join_thread(thread: threading.Thread) -> None:
    """Waits until a thread that has done its work is gone from the system as well.

    Before Python 3.13 `join` returns a moment earlier (CPython issue 110829). In that moment PyTorch takes the thread's
    own Python objects back, for which it needs the interpreter: if that has ended meanwhile, the process aborts.
    """
    thread.join()
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):
        os.sched_yield()


def surely(acts: Sequence[Callable[[], None]]) -> None:
    """Does every act, in order, although this thread may be interrupted meanwhile; raises the interruption afterwards.

    Args:
        acts: doing one twice is like doing it once.
    """
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


class FairSemaphore:
    """At most so many threads at once; the others wait in the order in which they came."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._waiting: deque[threading.Lock] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Waits for a turn, and hands it on at the end."""
        with self._lock:
            mine = threading.Lock() if not self._free else None
            if mine is None:
                self._free -= 1
            else:
                mine.acquire()
                self._waiting.append(mine)
        if mine is not None:
            mine.acquire()  # until who had the turn has handed it on
        try:
            yield
        finally:
            with self._lock:
                if self._waiting:
                    self._waiting.popleft().release()
                else:
                    self._free += 1
