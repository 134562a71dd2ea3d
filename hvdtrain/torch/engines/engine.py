"""Joins this process to the others (what `hvdtrain.init("torch")` calls), and finds the engine of a world again."""

from __future__ import annotations

import importlib

import torch

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.launchers import Detected
from hvdtrain.torch.engines import unprepared
from hvdtrain.torch.engines.base import TorchEngine
from hvdtrain.torch.engines.solo import Solo
from hvdtrain.world.resources import keep_freed_memory
from hvdtrain.world.world import World


def attach(detected: Detected, *, engine: str, device: str, gpus_per_rank: int, seed: int) -> TorchEngine:
    """Starts the engine of this name, pins this rank's GPUs, and seeds PyTorch the same on every rank, so that all
    build the same initial weights; each rank's dropout stream is derived when training is prepared.

    Raises:
        ConfigError: a GPU is requested, but none is visible.
        ModuleNotFoundError: the engine's package is missing (the error of `init` shows how to get it).
    """
    module = importlib.import_module(f"hvdtrain.torch.engines.{engine}")
    started: TorchEngine = module.attach(detected, device=device, gpus_per_rank=gpus_per_rank)
    if started.device.type == "cpu":
        keep_freed_memory()
    torch.manual_seed(seed)  # of all devices
    unprepared.watch()
    return started


def engine_of(world: World) -> TorchEngine:
    """Returns the world's engine; one process without any gets the engine of one. Raises `ConfigError` if the world
    is another framework's."""
    comm = world.comm
    if isinstance(comm, TorchEngine):
        return comm
    if world.size == 1:
        return Solo(devices=tuple(world.devices))
    raise ConfigError(
        "hvdtrain.torch needs ranks that can exchange tensors",
        f"a world on {comm.name!r}, which cannot send tensors",
        'call hvdtrain.init("torch")',
    )


def device_of(world: World) -> torch.device:
    """Returns where this rank computes; ranks that carry no tensors do on the CPU."""
    device: torch.device = getattr(world.comm, "device", torch.device("cpu"))
    return device
