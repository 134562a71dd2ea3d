"""hvdtrain: train Keras 3 and PyTorch on Horovod with today's frameworks.

`import hvdtrain` costs milliseconds: names are looked up on first use, and no framework (nor numpy) is imported
until an adapter needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME_OF = {
    "Checkpointer": "checkpoint",
    "Progress": "checkpoint",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "HvdtrainError": "errors",
    "LauncherError": "errors",
    "MainRankError": "errors",
    "NonFiniteError": "errors",
    "ReplicaError": "errors",
    "exit_with": "errors",
    "LR": "lr",
    "Plan": "shard",
    "Share": "shard",
    "contiguous": "shard",
    "RunLog": "telemetry",
    "Detected": "world",
    "World": "world",
    "current": "world",
    "detect": "world",
    "gpus_for": "world",
    "init": "world",
}

__all__ = ["__version__", *sorted(_HOME_OF)]

if TYPE_CHECKING:
    from hvdtrain.checkpoint import Checkpointer as Checkpointer
    from hvdtrain.checkpoint import Progress as Progress
    from hvdtrain.errors import CheckpointError as CheckpointError
    from hvdtrain.errors import ConfigError as ConfigError
    from hvdtrain.errors import HvdtrainError as HvdtrainError
    from hvdtrain.errors import LauncherError as LauncherError
    from hvdtrain.errors import MainRankError as MainRankError
    from hvdtrain.errors import NonFiniteError as NonFiniteError
    from hvdtrain.errors import ReplicaError as ReplicaError
    from hvdtrain.errors import exit_with as exit_with
    from hvdtrain.lr import LR as LR
    from hvdtrain.shard import Plan as Plan
    from hvdtrain.shard import Share as Share
    from hvdtrain.shard import contiguous as contiguous
    from hvdtrain.telemetry import RunLog as RunLog
    from hvdtrain.world import Detected as Detected
    from hvdtrain.world import World as World
    from hvdtrain.world import current as current
    from hvdtrain.world import detect as detect
    from hvdtrain.world import gpus_for as gpus_for
    from hvdtrain.world import init as init


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hvdtrain.{_HOME_OF[name]}"), name)
    globals()[name] = value  # the next look-up is a plain global
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
