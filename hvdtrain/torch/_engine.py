"""Joins this process to the others; what ``hvdtrain.init("torch")`` calls."""

from __future__ import annotations

import torch

from hvdtrain.allocator import keep_freed_memory
from hvdtrain.launchers import Detected
from hvdtrain.torch import engines
from hvdtrain.torch.engines.base import TorchEngine


def attach(detected: Detected, *, engine: str, device: str, gpus_per_rank: int, seed: int) -> TorchEngine:
    """Starts the engine, pins this rank's GPUs and seeds PyTorch.

    Args:
        detected: what the launcher says about this process.
        engine: one of ``hvdtrain.torch.engines``.
        device: ``auto`` | ``cpu`` | ``cuda``.
        gpus_per_rank: GPUs a rank uses.
        seed: the same on every rank, so that all build the same initial weights; each rank's dropout stream is
            derived from it when training is prepared.

    Raises:
        ConfigError: an engine that is not known, or a GPU asked for where none is visible.
        ModuleNotFoundError: the engine's package is missing (``init`` says how to get it).
    """
    started = engines.attach(engine, detected, device=device, gpus_per_rank=gpus_per_rank)
    if started.device.type == "cpu":
        keep_freed_memory()
    torch.manual_seed(seed)  # of all devices
    return started
