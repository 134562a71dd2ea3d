"""What an engine is, which there are, which one a launch calls for, and the engine of one process.

Adapters bring the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hvdtrain.core.errors import ConfigError, LauncherError
from hvdtrain.core.launchers import Detected


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


@dataclass(frozen=True)
class Kind:
    """What an engine is for.

    Attributes:
        frameworks: whose adapters have it.
        launchers: what can start several ranks for it; empty: it is for one process. One process needs no launcher.
        remedy: what to type where the launcher cannot; {size} is the number of ranks.
    """

    frameworks: tuple[str, ...]
    launchers: tuple[str, ...]
    remedy: str


_MPI = ("horovodrun", "mpirun", "mpijob", "srun")
_HOROVODRUN = "horovodrun -np {size} [-H host1:slots,host2:slots] python ..., or mpirun, or srun --mpi=pmix"
_TORCHRUN = "torchrun --nproc-per-node {size} ..."
_ONE = 'leave engine="auto", or start the program without a launcher'

# "auto" takes the first that the framework has and the launcher can start
ENGINES = {
    "horovod": Kind(("torch", "keras"), _MPI, _HOROVODRUN),
    "ddp": Kind(("torch",), ("torchrun", "openpai", *_MPI), _TORCHRUN),
    "deepspeed": Kind(("torch",), ("torchrun", "openpai", *_MPI), _TORCHRUN),
    "dataparallel": Kind(("torch",), (), _ONE),
    "solo": Kind(("torch", "keras"), (), _ONE),
}


def choose_engine(engine: str, detected: Detected, framework: str) -> str:
    """Return the engine to attach, "auto" resolved; pure.

    "auto" is "solo" for one process that no launcher of Horovod's started; else Horovod, or DDP where the launcher
    cannot start Horovod (torchrun, OpenPAI, variables set by hand).

    Raises:
        ConfigError: the framework's adapter has no such engine.
        LauncherError: this launcher cannot start ranks for that engine.
    """
    mine = [name for name, kind in ENGINES.items() if framework in kind.frameworks]
    if engine == "auto":
        if detected.size == 1 and detected.launcher not in _MPI:
            return "solo"
        able = [name for name in mine if detected.launcher in ENGINES[name].launchers]
        engine = able[0] if able else mine[0]
    if engine not in mine:
        raise ConfigError(
            f"the engines for {framework} are {', '.join(sorted(mine))}", f"engine={engine!r}", 'leave engine="auto"'
        )
    kind = ENGINES[engine]
    if detected.size == 1 or detected.launcher in kind.launchers:
        return engine
    if not kind.launchers:
        rule, came = f"engine {engine!r} is for one process", f"{detected.launcher} started {detected.size} ranks"
    else:
        rule = f"{engine}'s ranks cannot be started by {detected.launcher}"
        came = f"{detected.launcher} gave rank {detected.rank} of {detected.size}"
    raise LauncherError(rule, came, kind.remedy.format(size=detected.size))
