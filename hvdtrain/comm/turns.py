"""Programs that take turns: a program that a benchmark has started continues on an order, and answers with its times.

A job of the benchmark's own serves `orders`. Under `hvdtrain bench train --tune` any prepared training serves them
automatically: it pauses after an update until its next turn, and its program ends with the benchmark.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from typing import Any

from hvdtrain.core import variables
from hvdtrain.core.launchers import detect

WARM_UP = 5  # updates before the first turn: proofs, buffers, Horovod's cache
_taking: Generator[None, None, None] | None = None


def orders(rank: int) -> Iterator[tuple[dict[str, Any], Connection]]:
    """A rank's side: the orders as they come, each with the connection to answer on; the process ends with the bench,
    at once: the others are gone, and no engine's goodbye waits for them."""
    with Client(
        os.environ[variables.TURNS_ADDRESS], "AF_UNIX", authkey=os.environ[variables.TURNS_KEY].encode()
    ) as connection:
        connection.send((rank, os.getpid()))
        with suppress(EOFError, ConnectionResetError):
            while True:
                yield connection.recv(), connection
    sys.stdout.flush()
    os._exit(0)


def updated(what: str, weights: Callable[[], list[float]]) -> None:
    """Notes an update: where trainings take turns, waits for the next turn when this one is over. `what` trains on
    what ("torch cpu") goes with the answers; `weights` gives a few of the model's, for which the device must be
    done."""
    global _taking
    if variables.TURNS_TRAINING in os.environ:
        if _taking is None:
            _taking = _turns(what, weights)
        next(_taking)


def _turns(what: str, weights: Callable[[], list[float]]) -> Generator[None, None, None]:
    """Serves the turns: the caller's `next` reports one completed update. Reads the first model's weights only."""
    before = weights()
    for _ in range(WARM_UP):
        yield
    moved = [now - then for now, then in zip(weights(), before, strict=True)]
    for order, connection in orders(detect(os.environ).rank):
        yield  # not counted: the ranks have just been woken
        weights()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(order["steps"]):
            yield
        weights()
        wall, cpu = (time.perf_counter() - wall) / order["steps"], (time.process_time() - cpu) / order["steps"]
        connection.send({"wall": wall, "cpu": cpu, "moved": moved, "what": what})
