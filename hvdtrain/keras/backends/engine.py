"""Joins this process to the others and carries bytes between them, through Horovod's primitive operations."""

from __future__ import annotations

import os
from collections.abc import Sequence

import keras
import numpy as np

from hvdtrain.comm.elastic import place_on_host
from hvdtrain.comm.engines import Engine, HorovodCollectives, SoloEngine
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.launchers import Detected, gpus_for
from hvdtrain.keras.backends.chosen import BACKEND


def attach(detected: Detected, *, engine: str, device: str, gpus_per_rank: int, seed: int) -> Engine:
    """Starts the engine, pins this rank's GPUs and seeds Keras; called by `hvdtrain.init("keras")`.

    Raises:
        ConfigError: a GPU is requested, but none is visible.
        ModuleNotFoundError: Horovod is missing (the error of `init` shows how to build it).
    """
    visible = 0 if device == "cpu" else BACKEND.visible_gpus()
    if device == "cuda" and visible == 0:
        raise ConfigError(
            "device=cuda needs a GPU that the framework can see",
            f"none visible to {BACKEND.name} (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r})",
            "install a CUDA build of the backend, or leave device='auto'",
            code=4,
        )
    devices = gpus_for(*place_on_host(detected.local_rank, detected.local_size), visible, gpus_per_rank)
    BACKEND.pin(devices, cpu_only=device == "cpu")
    keras.utils.set_random_seed(seed)
    if engine == "solo":
        return SoloEngine(devices=devices)
    return KerasHorovodEngine.join(BACKEND.hvd, detected, devices)


class KerasHorovodEngine(HorovodCollectives):
    """`hvdtrain.comm.engines.Engine` on the Horovod of Keras' backend."""

    def host_sum(self, array: np.ndarray) -> np.ndarray:
        return BACKEND.host_allreduce(array, "sum", self.next_name())

    def host_broadcast(self, array: np.ndarray, root: int) -> np.ndarray:
        return BACKEND.host_broadcast(array, root, self.next_name())

    def host_gather(self, array: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        return BACKEND.host_allgather(array, self.next_name())
