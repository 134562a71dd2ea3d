"""`World`: the ranks of a job, as programs use them. One process is a world of one (`SoloEngine`)."""

from __future__ import annotations

import functools
import hashlib
import math
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hvdtrain.comm import elastic
from hvdtrain.comm.elastic import repeated
from hvdtrain.comm.engines import Engine, SoloEngine, mpi_communicator
from hvdtrain.core.errors import ConfigError, HvdtrainError, MainRankError, Preempted, ReplicaError, by_rank, note_exit
from hvdtrain.core.launchers import ALONE, Detected
from hvdtrain.watch import preemption
from hvdtrain.watch.meeting import BARRIER, END, OFF, Tracker

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The ranks of one job, seen from this process; `hvdtrain.init` returns it.

    Example:
        world.on_main(print, "rank 0 prints this")
        totals = world.sum({"right": right, "samples": len(y)})
        world.agree("vocabulary size", len(vocabulary))

    Attributes:
        rank, size: this process's rank, and the number of ranks.
        local_rank, local_size: the same within this host.
        node: the index of this host; hosts are in the order of their lowest ranks.
        launcher: the launcher that started the ranks ("horovodrun", "mpirun", ... or "none").
        engine: the engine that carries data between the ranks ("horovod", "solo", ...).
        devices: GPUs of this process, as indices among the visible ones; empty on CPU.
        seed: the same on every rank.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    launcher: str
    engine: str
    devices: tuple[int, ...]
    seed: int
    comm: Engine = field(repr=False, compare=False)
    tracker: Tracker = field(default=OFF, repr=False, compare=False)

    def become(self, node: int, tracker: Tracker) -> None:
        """Takes the place that the engine has by now: the ranks of an elastic job have changed."""
        comm = self.comm
        now = {"rank": comm.rank, "size": comm.size, "local_rank": comm.local_rank, "local_size": comm.local_size}
        for name, value in {**now, "node": node, "tracker": tracker}.items():
            object.__setattr__(self, name, value)  # frozen for everybody else

    @property
    def is_main(self) -> bool:
        """Returns True on rank 0, the rank that writes files and prints."""
        return self.rank == 0

    @property
    def mpi(self) -> Any:
        """Returns mpi4py's communicator of these ranks, for your own collectives on numpy arrays.

        It is `mpi4py.MPI.COMM_WORLD`; Horovod uses duplicates of it. It ends with the world.

        Raises:
            LauncherError: MPI does not carry this job, or mpi4py belongs to another MPI than the launcher.
            ConfigError: mpi4py or MPI is missing, the world has ended, or MPI was started without threads.
        """
        return mpi_communicator(self.rank, self.size, self.launcher, self.engine)

    @classmethod
    def solo(cls, *, seed: int = 0) -> World:
        """Returns a world of one rank that needs no framework, for tools and tests."""
        return World.on(SoloEngine(), ALONE, seed=seed, node=0)

    @classmethod
    def on(cls, comm: Engine, detected: Detected, *, seed: int, node: int, tracker: Tracker = OFF) -> World:
        """Returns the world of an engine whose ranks have met, by `node`, the index of this host."""
        return World(
            rank=comm.rank,
            size=comm.size,
            local_rank=comm.local_rank,
            local_size=comm.local_size,
            node=node,
            launcher=detected.launcher,
            engine=comm.name,
            devices=tuple(comm.devices),
            seed=seed,
            comm=comm,
            tracker=tracker,
        )

    def in_step(self, kind: str, key: object = "", *, value: float | None = None) -> AbstractContextManager[float]:
        """Returns a context that every rank enters together; collective.

        Args:
            kind: the work in it.
            key: what else must be the same on all ranks.
            value: the context returns its sum over ranks; None on every rank: 0.

        Raises:
            ReplicaError: on every rank, with the line of each, if they are about to do different things.
        """
        return self.tracker.meeting(self.comm, kind, str(key), value)

    @repeated
    def barrier(self) -> None:
        """Waits until every rank has called it."""
        with self.in_step(BARRIER):
            self.comm.barrier()

    @repeated
    def broadcast(self, obj: T, root: int = 0) -> T:
        """Returns rank `root`'s `obj` (picklable) on every rank, and ignores those of the other ranks.

        A rank that gives None may call it on another line of the same function, as in the branches of an `if`.
        """
        if not 0 <= root < self.size:
            raise ConfigError(f"the root of a broadcast must be a rank below {self.size}", f"root={root}")
        if self.size == 1:
            return obj
        data = _pickled(obj) if self.rank == root else None
        receives = obj is None and self.rank != root
        with self.tracker.meeting(self.comm, "broadcast", str(root), receives=receives):
            received = self.comm.broadcast_bytes(data, root)
        return obj if self.rank == root else pickle.loads(received)

    @repeated
    def gather(self, obj: T) -> list[T]:
        """Returns a list of every rank's `obj` (picklable), in rank order, on every rank."""
        data = _pickled(obj)
        with self.in_step("gather", _asking()):
            return [pickle.loads(data) for data in self.comm.allgather_bytes(data)]

    def mean(self, values: Mapping[str, float], weight: float = 1.0) -> dict[str, float]:
        """Returns the weighted mean of each value over ranks; bit-equal on every rank.

        Args:
            values: name to value; the same names on every rank.
            weight: the weight of this rank's values, usually its number of samples. A rank of weight 0 takes part but
                does not count, even if its values are NaN or missing.

        Raises:
            ReplicaError: on every rank, if names differ, or a weight is negative or not finite.
        """
        reports = self.gather(({name: float(value) for name, value in values.items()}, float(weight)))
        if not all(math.isfinite(its_weight) and its_weight >= 0 for _, its_weight in reports):
            raise ReplicaError(
                "weights of a mean must be finite and >= 0", per_rank([w for _, w in reports]), shared=True
            )
        live = [(its_values, its_weight) for its_values, its_weight in reports if its_weight > 0]
        names = _same_names([its_values for its_values, its_weight in reports if its_values or its_weight])
        total = math.fsum(its_weight for _, its_weight in live)
        if total == 0:
            return dict.fromkeys(names, math.nan)
        return {name: fsum(v[name] * w for v, w in live) / total for name in names}

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Returns the sum of each value over ranks; bit-equal on every rank.

        Raises:
            ReplicaError: on every rank, if names differ.
        """
        reports = self.gather({name: float(value) for name, value in values.items()})
        return {name: fsum(its_values[name] for its_values in reports) for name in _same_names(reports)}

    def agree(self, name: str, value: Any) -> None:
        """Checks that every rank has an equal `value` (picklable).

        Raises:
            ReplicaError: on every rank, with each rank's value, if they differ.
        """
        values = self.gather(value)
        if not all(_equal(other, values[0]) for other in values[1:]):
            raise ReplicaError(
                f"{name} must be the same on every rank",
                per_rank(values),
                f"give every rank the same {name}: same flags, same files, same seed",
                shared=True,
            )

    def agree_all(self, mine: Mapping[str, object], rule: str, remedy: Callable[[str], str]) -> None:
        """Checks that every rank has an equal mapping, by a digest. `rule` (with {} for the name) and `remedy` are the
        error's. Raises `ReplicaError` on every rank, with the first name that differs and each rank's value."""
        digest = hashlib.sha256(repr(list(mine.items())).encode()).hexdigest()
        if len(set(self.gather(digest))) == 1:
            return
        reports = self.gather({**mine, "order": list(mine)})
        for name in dict.fromkeys(name for report in reports for name in report):
            values = [report.get(name, "absent") for report in reports]
            if any(repr(value) != repr(values[0]) for value in values):  # NaN is what it is on all ranks
                raise ReplicaError(rule.format(name), by_rank(list(map(str, values))), remedy(name), shared=True)

    def on_main(self, fn: Callable[..., T], *args: Any, **kw: Any) -> T:
        """Runs `fn(*args, **kw)` on rank 0 and returns its (picklable) result on every rank.

        If `fn` fails, rank 0 raises its exception, and every other rank raises `MainRankError` with the message and the
        traceback. `fn` must not call anything collective: only rank 0 runs it.
        """
        if not callable(fn):
            raise ConfigError(
                "on_main() needs a function, and what to call it with", f"{fn!r:.60}, which a call returned",
                'world.on_main(print, "saved"), not world.on_main(print("saved"))',
            )  # fmt: skip
        return self._on_main(
            functools.lru_cache(maxsize=1)(lambda: fn(*args, **kw)), getattr(fn, "__qualname__", repr(fn))
        )

    @repeated
    def _on_main(self, call: Callable[[], T], name: str) -> T:
        """`call` remembers what it has returned: it runs once, however often its result has to be sent."""
        if self.size == 1:
            return call()
        with self.in_step("on_main"):
            if self.rank == 0:
                return self._run_for_all(call, name)
            failure, result = pickle.loads(self.comm.broadcast_bytes(None, 0))
        if failure is not None:
            raise failure
        return result

    def _run_for_all(self, call: Callable[[], T], name: str) -> T:
        try:
            with self.tracker.on_main(name):
                result = call()
            outcome = pickle.dumps((None, result))
        except BaseException as error:  # whatever it is, the others are waiting for an answer
            self.comm.broadcast_bytes(pickle.dumps((_failure_on_main(error), None)), 0)
            if isinstance(error, HvdtrainError):
                error.shared = True
            raise
        self.comm.broadcast_bytes(outcome, 0)
        return result

    @repeated
    def end(self) -> None:
        """Waits until every rank is at the end of the program."""
        with self.in_step(END):
            pass

    def __enter__(self) -> World:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None = None, *_: object) -> None:
        """Leaves the ranks. On an exception nothing collective runs: the others may be elsewhere, or gone."""
        if exc_type is not None and issubclass(exc_type, Preempted) and self.size > 1:
            return  # the ranks meet once more, at the end of the program: until then another signal ends none of them
        if isinstance(exc, SystemExit):
            note_exit(exc.code)
        if exc is not None and not (isinstance(exc, SystemExit) and not exc.code):
            self.tracker.fails(exc, ends=False)  # by when it came, not by when this process has ended
        if exc_type is None:
            self.end()
        preemption.release()
        if exc_type is not None:
            return
        self.tracker.leave()
        self.comm.shutdown()
        if _current is self:
            set_current(None)


def _failure_on_main(error: BaseException) -> MainRankError:
    """Returns the error that the other ranks raise: plain text, as its class may be missing there or not picklable."""
    name, text = type(error).__name__, "".join(traceback.format_exception(error))
    if isinstance(error, HvdtrainError):
        return MainRankError(error.rule, error.received, error.remedy, error_type=name, main_traceback=text)
    return MainRankError(f"{name} on rank 0: {error}", error_type=name, main_traceback=text)


def fsum(values: Any) -> float:
    """Sums without rounding on the way, so the order of ranks does not matter; inf and nan pass as in IEEE."""
    terms = list(values)
    try:
        return math.fsum(terms) if all(map(math.isfinite, terms)) else float(sum(terms))
    except OverflowError:  # on the way, or for good
        return math.fsum(term * 2.0**-64 for term in terms) * 2.0**64


def _equal(one: Any, other: Any) -> bool:
    """Returns True if two values are equal; compares arrays and tensors (`==` gives no bool) and NaN by their bytes."""
    try:
        if bool(one == other):
            return True
    except (TypeError, ValueError, RuntimeError):
        pass
    return pickle.dumps(one) == pickle.dumps(other)


def _asking() -> str:
    """Returns the function of hvdtrain that gathers: the user's line alone cannot distinguish two on one line."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in (__name__, elastic.__name__):
        frame = frame.f_back
    module = str(frame.f_globals.get("__name__"))
    return f"{module.removeprefix('hvdtrain.')}.{frame.f_code.co_name}" if module.startswith("hvdtrain.") else ""


def _pickled(obj: Any) -> bytes:
    try:
        return pickle.dumps(obj)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            "what is sent from rank to rank must be picklable",
            f"{type(obj).__name__}: {error}",
            "use classes and functions from the top level of a module; or send tensors, arrays and numbers",
        ) from error


def _same_names(reports: Sequence[Mapping[str, float]]) -> list[str]:
    names = [sorted(report) for report in reports]
    if any(other != names[0] for other in names[1:]):
        raise ReplicaError("every rank must report the same names", per_rank(names), shared=True)
    return list(reports[0]) if reports else []


def per_rank(values: Sequence[Any]) -> str:
    """Lists values per rank, equal neighbours folded: "ranks 0-2: 0.1" / "rank 3: 0.2"; of mappings what differs."""
    texts = list(map(repr, values))
    if all(isinstance(value, Mapping) for value in values):
        differing = [name for name in values[0] if len({repr(value.get(name)) for value in values}) > 1]
        texts = [", ".join(f"{name}={value.get(name)!r}" for name in differing) for value in values]
    return by_rank([text if len(text) <= 300 else text[:297] + "..." for text in texts])


_current: World | None = None


def current() -> World | None:
    """Returns the world of the last `init()`; None if there is none, or if it has ended.

    Example:
        world = hvdtrain.current() or hvdtrain.World.solo()
    """
    return _current


def set_current(world: World | None) -> None:
    """Notes the world that `init()` has joined; None: it was left."""
    global _current
    _current = world


def given_or_current(world: World | None, framework: str) -> World:
    """Returns the world given to an adapter, or that of the last `init()`; raises ConfigError if there is none."""
    found = world if world is not None else _current
    if found is None:
        raise ConfigError(
            "an adapter needs to know the ranks",
            "no world given, and hvdtrain.init was not called",
            f'with hvdtrain.init("{framework}") as world: ... around the program',
        )
    return found
