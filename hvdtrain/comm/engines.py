"""The interface and table of engines, the choice of one for a launch, and the engine of one process.

Adapters provide the other engines.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from hvdtrain.comm import elastic
from hvdtrain.comm.agent import Connections
from hvdtrain.comm.arrival import start_horovod
from hvdtrain.core.errors import ConfigError, LauncherError, RanksLost, build_horovod_command, install_command
from hvdtrain.core.launchers import Detected, gpus_for

if TYPE_CHECKING:
    from typing import Self  # from Python 3.11 on

    import numpy as np

# Horovod counts bytes in places with 32 bits, and every engine needs a second copy of each piece while it travels.
CHUNK_BYTES = 1 << 28


@runtime_checkable
class Engine(Protocol):
    """The interface of an engine, which carries bytes between ranks; all ranks call its methods in the same order."""

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
        """Returns root's `data` on every rank; `data` is ignored on the others."""

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """Returns every rank's `data` in rank order; lengths may differ."""

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        """Returns the elementwise sum over ranks in float64; every rank passes the same number of values."""

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
        """Returns at once: one process has no other to wait for."""

    def shutdown(self) -> None:
        """Does nothing: one process has no engine to shut down."""


@dataclass(kw_only=True)
class HostCollectives:
    """The `Engine` of several ranks; adapters bring three operations on writable numpy arrays in main memory."""

    name: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    devices: tuple[int, ...]

    def host_sum(self, array: np.ndarray) -> np.ndarray:
        """Returns the sum over ranks of int64 or float64 [n]."""
        raise NotImplementedError

    def host_broadcast(self, array: np.ndarray, root: int) -> np.ndarray:
        """Returns root's array, of the same type and shape on every rank."""
        raise NotImplementedError

    def host_gather(self, array: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        """Returns the ranks' uint8 arrays end to end; rank r's has `counts[r]` elements, at least one."""
        raise NotImplementedError

    def broadcast_bytes(self, data: bytes | None, root: int) -> bytes:
        import numpy as np

        mine = self.rank == root
        if mine and data is None:
            raise ValueError("the root of a broadcast must give the data")
        content = data if mine and data is not None else b""
        length = int(self.host_broadcast(np.array([len(content)], np.int64), root)[0])
        buffer = np.frombuffer(bytearray(content or bytes(length)), np.uint8)
        starts = range(0, length, CHUNK_BYTES)
        return b"".join(self.host_broadcast(buffer[at : at + CHUNK_BYTES], root).tobytes() for at in starts)

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        import numpy as np

        lengths = np.zeros(self.size, np.int64)
        lengths[self.rank] = len(data)
        lengths = self.host_sum(lengths)
        # a rank with nothing to say sends one byte: Horovod refuses to gather nothing but empty tensors
        counts = np.maximum(lengths, 1)
        joined = self.host_gather(np.frombuffer(bytearray(data or b"\0"), np.uint8), counts.tolist()).tobytes()
        starts = np.cumsum(counts) - counts
        return [joined[start : start + length] for start, length in zip(starts, lengths, strict=True)]

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        import numpy as np

        return self.host_sum(np.array(values, np.float64)).tolist() if len(values) else []

    def barrier(self) -> None:
        self.sum_floats([0.0])


# Horovod and MPI read these once, when they start; what the user has set stays.
_QUIET = {
    # The ranks ask each other for work every millisecond, 8 % of a core on CPU. This Horovod (`hvdtrain build-horovod`)
    # can wait for its own rank's next tensor instead, and looks up at least this often (ms); others ignore it.
    "HOROVOD_IDLE_CYCLE_TIME": "20",
    # Open MPI asks without a pause whether the others have come, in a thread beside the one that computes, and takes
    # it for granted that both have a core: a rank that waits lets others have it
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def gpus_of_rank(
    detected: Detected, device: str, visible: Callable[[], int], framework: str, per_rank: int
) -> tuple[int, ...]:
    """Returns the rank's GPUs, as indices among those `visible` to the framework; empty on CPU. Raises `ConfigError`
    for "cuda" without a GPU, `LauncherError` for too few GPUs for the ranks on this host."""
    seen = 0 if device == "cpu" else visible()
    if device == "cuda" and not seen:
        raise ConfigError(
            "device=cuda needs a GPU that the framework can see",
            f"{framework} sees none (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r})",
            "check nvidia-smi and the driver, install a CUDA build of the framework, or leave device='auto'",
            code=4,
        )
    return gpus_for(*elastic.place_on_host(detected.local_rank, detected.local_size), seen, per_rank)


@dataclass(kw_only=True)
class HorovodCollectives(HostCollectives):
    """Horovod's ranks (over Gloo, MPI or NCCL, as built and launched), whichever framework's Horovod it is."""

    hvd: Any = field(repr=False)
    name: str = "horovod"
    by_mpi: bool = False  # its ranks were started by MPI
    connections: Connections = field(default_factory=Connections, repr=False)
    _mpi_left: ClassVar[bool] = False  # by this process, which cannot start it again

    def __post_init__(self) -> None:
        # One counter for all kinds of calls: ranks out of step get Horovod's "mismatched operations" error under the
        # same name, where different names would leave each waiting for the other.
        self._calls = itertools.count()

    @classmethod
    def join(cls, hvd: Any, detected: Detected, devices: tuple[int, ...]) -> Self:
        """Returns the engine of `horovod.torch`, or another framework's, when all ranks have come, each with its
        GPUs; raises as `start_horovod`."""
        by_mpi = detected.rendezvous is None and detected.size > 1
        mpi = sys.modules.get("mpi4py.MPI")  # which outlives Horovod where the program itself has started it
        if by_mpi and cls._mpi_left and (mpi is None or mpi.Is_finalized()):
            raise LauncherError(
                "MPI cannot start twice in a process: Horovod has ended it with the first world",
                "hvdtrain.init after the world was left",
                "leave the world once, at the end; or import mpi4py.MPI before the first hvdtrain.init,\n"
                "which keeps MPI running; or use horovodrun --gloo, which can start again",
            )
        if detected.size > 1 and not (hvd.mpi_built() if by_mpi else hvd.gloo_built()):
            needed = "MPI" if by_mpi else "Gloo"
            other = "horovodrun --gloo, hvdtrain launch" if by_mpi else "mpirun, srun --mpi=pmix"
            raise LauncherError(
                f"the ranks of this job meet over {needed}, which Horovod must be built with",
                f"{detected.launcher} started {detected.size} ranks; this Horovod has no {needed}",
                f"{other}, or {build_horovod_command()}",
            )
        engine = cls(
            by_mpi=by_mpi, rank=detected.rank, size=detected.size, local_rank=detected.local_rank,
            local_size=detected.local_size, node=detected.node, devices=devices, hvd=hvd,
        )  # fmt: skip
        if not elastic.ranks().joining:
            engine._start(lambda: start_horovod(hvd.init, detected, os.environ))
        return engine

    def _start(self, start: Callable[[], None]) -> None:
        hvd = self.hvd
        for variable, value in _QUIET.items():
            os.environ.setdefault(variable, value)
        with elastic.ranks().connecting(self.connections):
            start()
        self.rank, self.size, self.node = hvd.rank(), hvd.size(), hvd.cross_rank()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        self._calls = itertools.count()

    def leave(self, *, cut: bool) -> None:
        """Shuts Horovod down; `cut`: closes its connections first, so that the others notice at once."""
        if cut:
            self.connections.cut()
        self.hvd.shutdown()

    def enter(self) -> None:
        """Starts Horovod again, with the place that the environment gives by now; raises `RanksLost` if not all
        came."""
        try:
            self._start(self.hvd.init)
        except Exception as error:  # of Horovod's, in several forms
            raise RanksLost("ranks of a formation must start Horovod", f"{type(error).__name__}: {error}") from error

    def next_name(self) -> str:
        """Returns a name that the next collective has on every rank."""
        return f"hvdtrain.host.{next(self._calls)}"

    def shutdown(self) -> None:
        self.hvd.shutdown()
        HorovodCollectives._mpi_left = self.by_mpi


@contextmanager
def losses_in(
    *errors: type[Exception], told_by: Callable[[Any], bool] = lambda error: True, who: str = "Horovod"
) -> Iterator[None]:
    """Raises `RanksLost` in place of the errors with which engine `who` gives up, in the middle of a collective or
    before the next; `told_by` returns True if an error comes from that engine."""
    try:
        yield
    except errors as error:
        if not told_by(error):
            raise
        raise RanksLost(
            "every rank must take part until the end",
            f"{who} gave up: {str(error).strip().partition(chr(10))[0][:300]}",  # which may be empty
            "read the output of the rank that ended first",
        ) from error


@dataclass(frozen=True)
class EngineInfo:
    """The frameworks and launchers that an engine supports. An engine of one process needs no launcher; an engine
    without launchers is for one process."""

    frameworks: tuple[str, ...]  # whose adapters have it
    launchers: tuple[str, ...]
    remedy: str  # what to type where the launcher cannot; {size} is the number of ranks


_MPI = ("horovodrun", "mpirun", "srun")
_HOROVODRUN = "horovodrun -np {size} [-H host1:slots,host2:slots] python ..., or mpirun, or srun --mpi=pmix"
_TORCHRUN = "torchrun --nproc-per-node {size} ..."
_ONE = 'leave engine="auto", or start the program without a launcher'

# "auto" takes the first that the framework has and the launcher can start
ENGINES = {
    "horovod": EngineInfo(("torch", "keras"), _MPI, _HOROVODRUN),
    "ddp": EngineInfo(("torch",), ("torchrun", "openpai", *_MPI), _TORCHRUN),
    "deepspeed": EngineInfo(("torch",), ("torchrun", "openpai", *_MPI), _TORCHRUN),
    "dataparallel": EngineInfo(("torch",), (), _ONE),
    "solo": EngineInfo(("torch", "keras"), (), _ONE),
}


def choose_engine(engine: str, detected: Detected, framework: str) -> str:
    """Returns the engine to attach; pure. "auto" is "solo" for one process that no launcher of Horovod's started;
    else Horovod, or DDP where the launcher cannot start Horovod (torchrun, OpenPAI, variables set by hand). Raises
    `ConfigError` for an engine that the framework's adapter lacks, `LauncherError` where this launcher cannot start
    ranks for it."""
    mine = [name for name, kind in ENGINES.items() if framework in kind.frameworks]
    if engine == "auto":
        if detected.size == 1 and detected.launcher not in _MPI:
            return "solo"
        able = [name for name in mine if detected.launcher in ENGINES[name].launchers]
        engine = able[0] if able else mine[0]
    if engine not in mine:
        raise ConfigError(
            f"engine= for {framework} must be {' or '.join(sorted(mine))}", f"engine={engine!r}", 'leave engine="auto"'
        )
    kind = ENGINES[engine]
    if detected.size == 1 or detected.launcher in kind.launchers:
        return engine
    if not kind.launchers:
        rule, received = f"engine {engine!r} needs one process", f"{detected.launcher} started {detected.size} ranks"
    else:
        rule = f"{engine}'s ranks cannot be started by {detected.launcher}"
        received = f"{detected.launcher} gave rank {detected.rank} of {detected.size}"
    raise LauncherError(rule, received, kind.remedy.format(size=detected.size))


# horovodrun on Gloo and torchrun start ranks without MPI: each would be a world of one there
WITHOUT_MPI = ("horovodrun", "torchrun", "openpai")


def mpi_communicator(rank: int, size: int, launcher: str, engine: str) -> Any:
    """Returns `mpi4py.MPI.COMM_WORLD`, once it is known to be the world with these attributes; see `World.mpi`."""
    if launcher in WITHOUT_MPI:
        raise LauncherError(
            "MPI must carry the job where its communicator is asked for",
            f"{size} ranks started by {launcher}, without MPI",
            "mpirun -np N python ..., or horovodrun --mpi, or srun --mpi=pmix",
            shared=True,
        )
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library that it can load
        raise ConfigError(
            "World.mpi needs mpi4py, and an MPI", f"{type(error).__name__}: {error}", install_command("mpi")
        ) from error
    if MPI.Is_finalized():
        raise ConfigError("World.mpi needs a world", "the world was left", "use World.mpi inside `with hvdtrain.init`")
    comm = MPI.COMM_WORLD
    if (comm.size, comm.rank) != (size, rank):
        raise LauncherError(
            "mpi4py must see the ranks that the launcher started",
            f"rank {comm.rank} of {comm.size} by mpi4py ({MPI.Get_library_version().splitlines()[0].strip()}),"
            f" rank {rank} of {size} by {launcher}",
            "mpi4py and the launcher must be of one MPI (MPI4PY_LIBMPI=/path/to/libmpi.so names mpi4py's)",
        )
    if engine == "horovod" and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigError(
            "Horovod's thread and yours use MPI at once: it must be started with MPI_THREAD_MULTIPLE",
            "started with less, before hvdtrain.init",
            "call hvdtrain.init before the first import of mpi4py.MPI, or leave mpi4py.rc as it is",
        )
    return comm
