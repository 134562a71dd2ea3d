"""Threads that take turns where there is not room for all of them; pure."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
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
