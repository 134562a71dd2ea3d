"""The engines of the PyTorch adapter: one file each, behind one small protocol (`base`)."""

from __future__ import annotations

import importlib

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.launchers import Detected
from hvdtrain.torch.engines.base import TorchEngine

# each module has attach(detected, device=..., gpus_per_rank=...) -> TorchEngine
_MODULES = ("solo", "horovod", "ddp", "dataparallel", "deepspeed")


def attach(name: str, detected: Detected, *, device: str, gpus_per_rank: int) -> TorchEngine:
    """Starts the engine `name` and returns it.

    Raises:
        ConfigError: no such engine.
        ModuleNotFoundError: the package it needs is missing.
    """
    if name not in _MODULES:
        raise ConfigError(f"the engines for PyTorch are {', '.join(_MODULES)}", f"engine={name!r}")
    module = importlib.import_module(f"hvdtrain.torch.engines.{name}")
    engine: TorchEngine = module.attach(detected, device=device, gpus_per_rank=gpus_per_rank)
    return engine
