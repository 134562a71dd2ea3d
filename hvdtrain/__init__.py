"""hvdtrain: train Keras 3 and PyTorch on Horovod with today's frameworks.

`import hvdtrain` costs milliseconds: names are looked up on first use, and no framework (nor numpy) is imported
until an adapter needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain.core import public
from hvdtrain.core.version import __version__ as __version__

__getattr__, __dir__, __all__ = public(__name__, {
    "cluster.function.function": "run",
    "cluster.launch.job": "Timeouts",
    "core.errors": "CheckpointError ConfigError HvdtrainError LauncherError MainRankError NonFiniteError "
        "Preempted ReplicaError exit_with",
    "world.join": "init",
    "core.launchers": "Detected detect gpus_for",
    "core.lr": "LR",
    "core.sharding": "Plan Step contiguous",
    "world.world": "World current",
    "checkpoint.checkpoint": "Checkpointer",
    "record.log": "RunLog",
    "checkpoint.parts": "Progress",
})  # fmt: skip

__all__ += ["__version__"]

if TYPE_CHECKING:
    from hvdtrain.checkpoint.checkpoint import Checkpointer as Checkpointer
    from hvdtrain.checkpoint.parts import Progress as Progress
    from hvdtrain.cluster.function.function import run as run
    from hvdtrain.cluster.launch.job import Timeouts as Timeouts
    from hvdtrain.core.errors import CheckpointError as CheckpointError
    from hvdtrain.core.errors import ConfigError as ConfigError
    from hvdtrain.core.errors import HvdtrainError as HvdtrainError
    from hvdtrain.core.errors import LauncherError as LauncherError
    from hvdtrain.core.errors import MainRankError as MainRankError
    from hvdtrain.core.errors import NonFiniteError as NonFiniteError
    from hvdtrain.core.errors import Preempted as Preempted
    from hvdtrain.core.errors import ReplicaError as ReplicaError
    from hvdtrain.core.errors import exit_with as exit_with
    from hvdtrain.core.launchers import Detected as Detected
    from hvdtrain.core.launchers import detect as detect
    from hvdtrain.core.launchers import gpus_for as gpus_for
    from hvdtrain.core.lr import LR as LR
    from hvdtrain.core.sharding import Plan as Plan
    from hvdtrain.core.sharding import Step as Step
    from hvdtrain.core.sharding import contiguous as contiguous
    from hvdtrain.record.log import RunLog as RunLog
    from hvdtrain.world.join import init as init
    from hvdtrain.world.world import World as World
    from hvdtrain.world.world import current as current
