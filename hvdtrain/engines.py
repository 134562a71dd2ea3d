"""What an engine is, and the engine of one process. Adapters bring the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@runtime_checkable
class Engine(Protocol):
    """What carries bytes between ranks; its methods are collective: all ranks call them in the same order."""

    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def node(self) -> int: ...
    @property
    def devices(self) -> tuple[int, ...]: ...

    def broadcast_bytes(self, data: bytes | None, root: int) -> bytes:
        """Return root's `data` on every rank; `data` is ignored on the others."""
        ...

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's `data` in rank order; lengths may differ."""
        ...

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise sum over ranks in float64; every rank passes the same number of values."""
        ...

    def barrier(self) -> None: ...
    def shutdown(self) -> None: ...


@dataclass(frozen=True)
class SoloEngine:
    """The engine of one process: every collective is the identity."""

    name: str = "solo"
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    devices: tuple[int, ...] = ()

    def broadcast_bytes(self, data: bytes | None, root: int) -> bytes:
        if data is None:
            raise ValueError("the root of a broadcast must give the data")
        return data

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        return [float(value) for value in values]

    def barrier(self) -> None:
        """Nobody to wait for."""

    def shutdown(self) -> None:
        """Nothing to end."""
