"""Joins this process to the others and carries bytes between them, through Horovod's primitive operations."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.in_step.arrival import start_horovod
from hvdtrain.core.world import Detected, Engine, SoloEngine, gpus_for
from hvdtrain.keras.backends.chosen import BACKEND

# Horovod counts bytes in places with 32 bits, and needs a second copy of each message while it travels.
CHUNK_BYTES = 1 << 28


def attach(detected: Detected, *, engine: str, device: str, gpus_per_rank: int, seed: int) -> Engine:
    """Starts the engine, pins this rank's GPUs and seeds Keras; called by ``hvdtrain.init("keras")``.

    Args:
        detected: what the launcher says about this process.
        engine: ``solo`` (one process, Horovod is not imported) or ``horovod``.
        device: ``auto`` | ``cpu`` | ``cuda``.
        gpus_per_rank: GPUs a rank uses.
        seed: the same on every rank, so that all build the same initial weights; each rank's dropout stream
            is derived from it when training starts.

    Raises:
        ConfigError: an engine that is not known, or a GPU asked for where none is visible.
        ModuleNotFoundError: Horovod is missing (``init`` says how to build it).
    """
    if engine not in ("solo", "horovod"):
        raise ConfigError("the Keras adapter's engines are solo and horovod", f"engine={engine!r}", "leave engine out")
    devices = _pin(detected, device, gpus_per_rank)
    keras.utils.set_random_seed(seed)
    if engine == "solo":
        return SoloEngine(devices=devices)
    hvd = BACKEND.hvd  # type: ignore[attr-defined]
    start_horovod(hvd.init, detected, os.environ)
    return HorovodEngine(
        rank=hvd.rank(), size=hvd.size(), local_rank=hvd.local_rank(), local_size=hvd.local_size(),
        node=hvd.cross_rank(), devices=devices, hvd=hvd,
    )  # fmt: skip


def _pin(detected: Detected, device: str, gpus_per_rank: int) -> tuple[int, ...]:
    visible = 0 if device == "cpu" else BACKEND.visible_gpus()
    if device == "cuda" and visible == 0:
        raise ConfigError(
            "device=cuda needs a GPU that the Keras backend can see",
            f"none visible to {BACKEND.name} (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r})",
            "install a CUDA build of the backend, or leave device='auto'",
        )
    devices = gpus_for(detected.local_rank, detected.local_size, visible, gpus_per_rank)
    BACKEND.pin(devices, cpu_only=device == "cpu")
    return devices


@dataclass
class HorovodEngine:
    """``hvdtrain.core.world.Engine`` on Horovod (Gloo, MPI or NCCL, as built and launched)."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    devices: tuple[int, ...]
    hvd: Any = field(repr=False)
    name: str = "horovod"

    def __post_init__(self) -> None:
        # One counter for all kinds of calls: ranks out of step get Horovod's "mismatched operations" error
        # under the same name, where different names would leave each waiting for the other.
        self._calls = itertools.count()

    def broadcast_bytes(self, data: bytes | None, root: int) -> bytes:
        """Returns root's ``data`` on every rank."""
        mine = self.rank == root
        if mine and data is None:
            raise ValueError("the root of a broadcast must give the data")
        length = np.array([len(data) if mine and data is not None else 0], np.int64)
        size = int(BACKEND.host_broadcast(length, root, self._next())[0])
        source = np.frombuffer(data, np.uint8) if mine and data is not None else np.zeros(size, np.uint8)
        pieces = [
            BACKEND.host_broadcast(source[start : start + CHUNK_BYTES].copy(), root, self._next()).tobytes()
            for start in range(0, size, CHUNK_BYTES)
        ]
        return b"".join(pieces)

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """Returns every rank's ``data``, in rank order."""
        lengths = BACKEND.host_allgather(np.array([len(data)], np.int64), self._next())
        # a rank with nothing to say sends one byte: an allgather of nothing but empty tensors is not
        # supported
        joined = BACKEND.host_allgather(np.frombuffer(data or b"\0", np.uint8).copy(), self._next()).tobytes()
        starts = np.concatenate([[0], np.cumsum(np.maximum(lengths, 1))])
        return [joined[start : start + length] for start, length in zip(starts, lengths, strict=False)]

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        """Returns the element-wise sums over ranks, in float64."""
        array = np.asarray(values, np.float64)
        return BACKEND.host_allreduce(array, "sum", self._next()).tolist() if array.size else []

    def barrier(self) -> None:
        self.sum_floats([0.0])

    def shutdown(self) -> None:
        self.hvd.shutdown()

    def _next(self) -> str:
        return f"hvdtrain.host.{next(self._calls)}"
