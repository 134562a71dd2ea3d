"""Work that goes through functions of its own."""

from __future__ import annotations

import time
from collections.abc import Callable


def first(seconds: float) -> None:
    time.sleep(seconds)


def second(seconds: float) -> None:
    time.sleep(seconds)


def third(seconds: float) -> None:
    time.sleep(seconds)


def work(seconds: float) -> None:
    """Takes so long, in ever new functions."""
    for number in range(int(seconds / 0.15)):
        names: dict[str, Callable[[], None]] = {"time": time}  # type: ignore[dict-item]
        exec(f"def step_{number}():\n    time.sleep(0.15)", names)
        names[f"step_{number}"]()
