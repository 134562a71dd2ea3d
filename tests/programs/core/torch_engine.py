"""A small real engine on horovod.torch for the core's own tests, in the place where an adapter has its
engine.

The core must work with any engine; this one is independent of the adapters and imports nothing when alone.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.comm.engines import Engine, SoloEngine
from hvdtrain.core.launchers import Detected

BLIND = False


def attach(detected: Detected, *, engine: str, device: str, gpus_per_rank: int, seed: int) -> Engine:
    if engine == "solo":
        return SoloEngine()
    if BLIND:
        return SoloEngine(name="blind")
    import horovod.torch as hvd

    hvd.init()
    return TorchEngine(hvd, hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank())


@dataclass(frozen=True)
class TorchEngine:
    hvd: Any
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    devices: tuple[int, ...] = ()
    name: str = "horovod"

    def broadcast_bytes(self, data: bytes | None, root: int) -> bytes:
        return self.hvd.broadcast_object(data if self.rank == root else None, root, name="bytes")

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        return self.hvd.allgather_object(data, name="all_bytes")

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        import torch

        return self.hvd.allreduce(torch.tensor(values, dtype=torch.float64), op=self.hvd.Sum, name="sum").tolist()

    def barrier(self) -> None:
        self.hvd.barrier()

    def shutdown(self) -> None:
        self.hvd.shutdown()


_package = types.ModuleType("hvdtrain.torch")
_package.__path__ = []
sys.modules["hvdtrain.torch"] = _package
sys.modules["hvdtrain.torch.engines.engine"] = sys.modules[__name__]
