"""Ranks 0 and 1 in one process, over real sockets; what would end them is noted."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hvdtrain.watch import watch


class Ended:
    """Takes the place of `watch.end_all`: `ended` is what each rank would have printed; `over`: both have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        self.code = code
        self.ended: dict[int, list[str]] = {}
        self.over = threading.Event()
        monkeypatch.setattr(watch, "end_all", self._end)
        monkeypatch.setattr(watch, "_TICK_S", 0.02)

    def _end(self, error: list[str], rank: int, links: Any, code: int) -> None:
        assert code == self.code
        self.ended[rank] = error
        for link in links if rank == 0 else ():
            link.send(end=error, code=code)
        if len(self.ended) == 2:
            self.over.set()
