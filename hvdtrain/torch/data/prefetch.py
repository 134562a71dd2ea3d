"""Batches are made ready while the one before is in use: by a thread, and on a GPU on a stream of their own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
DEPTH = 2  # batches ready at most: one hides the copy, a second evens out workers of uneven speed


class Ahead(Generic[T]):
    """Runs an iterator in a thread, `DEPTH` items ahead. On a GPU the thread's copies and kernels go to a stream of
    their own: they overlap the training's. Taking an item makes the training's stream (not the CPU) wait until it is
    ready."""

    def __init__(self, items: Iterator[T], device: torch.device, tensors: Callable[[T], list[torch.Tensor]]) -> None:
        self._items = items
        self._device = device
        self._tensors = tensors
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._changed = threading.Condition()
        self._ready: deque[tuple[T, Any]] = deque()
        self._error: BaseException | None = None
        self._ended = self._closed = False
        self._thread = threading.Thread(target=self._work, name="hvdtrain-prefetch", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            if self._stream is None:
                self._fill()
            else:
                with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                    self._fill()
        except BaseException as error:  # raised again where the batch is asked for
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _fill(self) -> None:
        for item in self._items:
            event = self._stream.record_event() if self._stream is not None else None
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._ready) < DEPTH)
                if self._closed:
                    return
                self._ready.append((item, event))
                self._changed.notify_all()

    def __iter__(self) -> Ahead[T]:
        return self

    def __next__(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended)
            if not self._ready:
                self._thread.join()
                if self._error is not None:
                    raise self._error
                raise StopIteration
            item, event = self._ready.popleft()
            self._changed.notify_all()
        if event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(event)
            for tensor in self._tensors(item):
                if tensor.is_cuda:
                    tensor.record_stream(stream)  # else its memory is given to the next batch while it is still read
        return item

    def close(self) -> None:
        """Ends the thread; what it was reading is finished first. Then closes the iterator."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        close = getattr(self._items, "close", None)
        if close is not None:
            close()
