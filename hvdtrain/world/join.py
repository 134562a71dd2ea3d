"""`init()` joins the ranks that a launcher started: it reads their places, starts the engine, and all ranks meet."""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import random
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from hvdtrain.comm import elastic
from hvdtrain.comm.agent import Form
from hvdtrain.comm.elastic import Elastic, JobRanks
from hvdtrain.comm.engines import Engine, HorovodCollectives, choose_engine
from hvdtrain.core.errors import (
    PREEMPTED_CODE,
    ConfigError,
    HvdtrainError,
    LauncherError,
    Preempted,
    ReplicaError,
    build_horovod_command,
    ended_by,
    exit_with,
    missing_package,
    note_exits,
)
from hvdtrain.core.keywords import refuses_other_keywords
from hvdtrain.core.launchers import Detected, detect
from hvdtrain.core.version import __version__
from hvdtrain.watch import preemption
from hvdtrain.watch.meeting import Tracker
from hvdtrain.watch.watch import after_s, hang_s, listen, start
from hvdtrain.world.startup import SAME_ON_ALL, load_triton_apart, use_tuned
from hvdtrain.world.world import World, current, per_rank, set_current

_ENGINES = {"torch": "hvdtrain.torch.engines.engine", "keras": "hvdtrain.keras.backends.engine"}
_STARTS_NOTHING = (
    "hvdtrain: this is one rank: python does not start others for -np\n  fix: hvdtrain launch -np 2 -- python train.py"
)
_CHOSEN = 2**32  # seeds that a program sets are below it; those that PyTorch draws, of 53 bits, almost never


@refuses_other_keywords(
    framework='hvdtrain.init("torch"), or hvdtrain.init("keras")',
    backend='engine="horovod", or "ddp"',
    gpus='device="cpu", "cuda" or "auto"',
)
def init(
    framework: Literal["torch", "keras"],
    *,
    engine: str = "auto",
    device: str = "auto",
    gpus_per_rank: int = 1,
    seed: int | None = None,
) -> World:
    """Joins the ranks that the launcher started, pins this rank's GPUs, and seeds Python, numpy and the framework.

    Example:
        with hvdtrain.init("torch") as world:
            print(f"rank {world.rank} of {world.size}")

    Args:
        framework: the framework that trains the model, "torch" or "keras".
        engine: "auto" is "solo" for one process without a launcher, else "horovod", or "ddp" if the launcher cannot
            start Horovod (torchrun, OpenPAI). `hvdtrain.comm.engines.ENGINES` lists them all.
        device: "auto" uses GPUs if there are any, "cpu" uses none, "cuda" requires them.
        gpus_per_rank: the GPUs of each rank; with "dataparallel" on a CPU, the pieces that it cuts a batch into.
        seed: the same on every rank; default: 0. It replaces a seed that you set before.

    Returns:
        The world. Use it as a context manager: its end shuts the engine down.

    Raises:
        LauncherError: launcher variables are incomplete, the launcher cannot start the engine, Horovod is missing, or
            the engine reports another world than the launcher.
        ConfigError: an argument is wrong, or the framework has no such engine or is not installed.
        ReplicaError: ranks have different versions of hvdtrain or different seeds.
        Preempted: the job was preempted before it began.
    """
    replaced, seed = _seeded() if seed is None else None, 0 if seed is None else seed
    _check_arguments(device, gpus_per_rank, seed)
    its = elastic.begin(os.environ)
    detected = _detected(its)
    chosen = _engine_of(framework, engine, detected, its)
    attach = _attach_of(framework)
    earlier = current()
    if earlier is not None:  # all ranks come again, or none
        with earlier.in_step("hvdtrain.init"):
            pass
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    try:
        comm = attach(detected, engine=chosen, device=device, gpus_per_rank=gpus_per_rank, seed=seed)
    except ImportError as error:
        raise _import_error(error, framework) from error
    load_triton_apart()
    _check_engine(detected, comm)
    if earlier is not None:
        earlier.tracker.close()
    node, tracker = (0, Tracker()) if its.joining else _meet(comm, framework, seed, detected)
    world = World.on(comm, detected, seed=seed, node=node, tracker=tracker)
    set_current(world)
    if replaced not in (None, seed) and earlier is None and world.is_main:
        _report_seed(framework, replaced)
    if chosen == "solo" and {"-np", "--np", "--nproc-per-node"} & set(sys.argv[1:]):
        print(_STARTS_NOTHING, file=sys.stderr, flush=True)
    if isinstance(its, Elastic):
        _let_it_change(world, its, framework)
    preemption.watch(comm.rank, tracker, os.environ)
    if comm.size > 1 or its.may_change:
        note_exits()
        _end_with_the_others(world)
    return world


def _check_arguments(device: object, gpus_per_rank: object, seed: object) -> None:
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError('device must be "auto", "cpu" or "cuda"', f"device={device!r}")
    if isinstance(gpus_per_rank, bool) or not isinstance(gpus_per_rank, int) or gpus_per_rank < 1:
        raise ConfigError("gpus_per_rank must be a whole number >= 1", f"gpus_per_rank={gpus_per_rank!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ConfigError("seed must be a whole number, 0 <= seed < 2**32", f"seed={seed!r}")


def _detected(its: JobRanks) -> Detected:
    """Returns this rank's place from the environment; also checks, on all ranks, variables that only rank 0 reads."""
    detected = detect(os.environ)
    if its.joining and detected.size == 1:
        detected = replace(detected, rank=1)  # like the others it is not the one that does what is done once
    use_tuned(detected)
    for seconds in (after_s, hang_s):
        seconds(os.environ)
    preemption.wanted(os.environ)
    # before anything counts GPUs: as nvidia-smi lists them, not the fastest first, which unlike GPUs would be
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return detected


def _engine_of(framework: str, engine: str, detected: Detected, its: JobRanks) -> str:
    if framework not in _ENGINES:
        fix = 'hvdtrain.init("keras")' if framework == "tensorflow" else 'hvdtrain.init("torch")'
        raise ConfigError('framework must be "torch" or "keras"', f"framework={framework!r}", fix)
    chosen = choose_engine(engine, detected, framework)
    if its.may_change and chosen != "horovod":
        raise ConfigError(
            "an elastic job needs Horovod",
            f"{framework} on {chosen}",
            "remove --min-np, --max-np and --host-discovery: --max-restarts resumes from the last checkpoint",
            shared=True,
        )
    return chosen


def _attach_of(framework: str) -> Callable[..., Engine]:
    """Returns what joins the ranks of a framework: the only place where its name is looked up."""
    try:
        attach: Callable[..., Engine] = importlib.import_module(_ENGINES[framework]).attach
    except Exception as error:
        raise _import_error(error, framework) from error
    return attach


def _report_seed(framework: str, replaced: object) -> None:
    print(
        f"hvdtrain: init() seeds Python, NumPy and {framework} with 0, in place of the seed {replaced} that was set"
        f"\n  fix: hvdtrain.init({framework!r}, seed={replaced}), or set the seed after init()",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def _seeded() -> int | None:
    """Returns the seed that the program has set, if it has: of Keras, or of PyTorch."""
    rng = sys.modules.get("keras.src.utils.rng_utils")
    found = rng.get_random_seed() if rng is not None else None
    torch = sys.modules.get("torch")
    if found is None and torch is not None and torch.initial_seed() < _CHOSEN:
        found = torch.initial_seed()
    return None if found is None else int(found)


def _end_with_the_others(world: World) -> None:
    """Registers `_leave_at_exit` again after each start of Horovod, so that it runs before Horovod's exit handler."""
    atexit.unregister(_leave_at_exit)
    atexit.register(_leave_at_exit, world, os.getpid())


def _let_it_change(world: World, its: Elastic, framework: str) -> None:
    """Sets the functions by which this process leaves its world and joins another."""
    comm: Any = world.comm

    def leave(*, cut: bool) -> None:
        world.tracker.close(wait=False)
        comm.leave(cut=cut)

    def join(form: Form) -> None:
        os.environ.update(elastic.variables_of(form))
        comm.enter()
        node, tracker = _meet(comm, framework, world.seed, detect(os.environ))
        _end_with_the_others(world)
        tracker.follow(world.tracker)
        world.become(node, tracker)
        preemption.follow(world.rank, tracker)

    def gather(obj: Any) -> list[Any]:
        return [pickle.loads(data) for data in comm.allgather_bytes(pickle.dumps(obj))]

    def broadcast(obj: Any, root: int) -> Any:
        return pickle.loads(comm.broadcast_bytes(pickle.dumps(obj), root))

    its.leave, its.join, its.gather, its.broadcast = leave, join, gather, broadcast


def _leave_at_exit(world: World, pid: int) -> None:
    """Waits for the other ranks at the end of a program that has not failed, so that the engine stays up for them."""
    if current() is not world or os.getpid() != pid:
        return
    failure = ended_by()
    if failure is not None:
        world.tracker.fails(failure)
        return
    try:
        world.end()
        world.tracker.leave()
        preemption.release()
        if not isinstance(world.comm, HorovodCollectives):  # which has an exit hook of its own
            # threads of a torch.distributed group that outlive Python abort: the last sum's tensor is Python's, too
            world.comm.shutdown()
    except ReplicaError as error:
        exit_with("hvdtrain", error, world.rank)
    except HvdtrainError:
        return  # the engine is down, which the rank that ended first has explained


def _import_error(error: Exception, framework: str) -> Exception:
    """Returns the error to raise instead: with the remedy where the cause is a package; else `error` itself."""
    missing = (error.name or str(error)) if isinstance(error, ModuleNotFoundError) else ""
    what = f"no module {missing!r}" if missing else f"{type(error).__name__}: {error}"
    received = f"{what} in {sys.executable} on {socket.gethostname()}"
    if missing.startswith("hvdtrain."):
        return ConfigError(f"this hvdtrain {__version__} must have an adapter for {framework}", what)
    if isinstance(error, ModuleNotFoundError) and missing.split(".")[0] != "horovod":
        return missing_package(error, framework)
    # an extension that was not built, or for other frameworks: ImportError, OSError or TensorFlow's NotFoundError
    if missing or (not isinstance(error, HvdtrainError) and "horovod" in str(error).lower()):
        return LauncherError(
            "Horovod must be installed on every rank, built for this Python and its frameworks",
            received,
            build_horovod_command(),
            code=1,
        )
    return error


def _check_engine(detected: Detected, comm: Engine) -> None:
    """Refuses a world in which launcher and engine disagree: each rank training alone looks just like training."""
    if (comm.rank, comm.size) == (detected.rank, detected.size):
        return
    remedies = {
        "srun": "start the ranks with `srun --mpi=pmix` (or pmi2), with a Horovod built with that MPI",
        "mpirun": f"rebuild Horovod with the MPI of this mpirun: {build_horovod_command()}",
    }
    raise LauncherError(
        "the launcher and the engine must see the same world",
        f"{detected.launcher} reports rank {detected.rank} of {detected.size},"
        f" {comm.name} reports rank {comm.rank} of {comm.size}",
        remedies.get(
            detected.launcher, "unset variables left over from another launcher, and start again through one launcher"
        ),
        code=8,
    )


def _meet(comm: Engine, framework: str, seed: int, detected: Detected) -> tuple[int, Tracker]:
    """Has every rank introduce itself; returns the index of this rank's host, and what keeps the ranks in step. The
    first collective of the job: it compares settings. Hosts are numbered in the order of their lowest rank."""
    listener, where = listen(detected, os.environ) if comm.rank == 0 and comm.size > 1 else (None, None)
    settings = {name: os.environ[name] for name in SAME_ON_ALL if name in os.environ}
    asked = preemption.asked(os.environ)
    card = (socket.gethostname(), __version__, framework, seed, where, os.getpid(), settings, asked)
    cards = [pickle.loads(data) for data in comm.allgather_bytes(pickle.dumps(card))]
    for position, name in ((1, "version of hvdtrain"), (2, "framework"), (3, "seed"), (6, "environment")):
        values = [card[position] for card in cards]
        if any(value != values[0] for value in values):
            fix = f'hvdtrain.init("{framework}", seed=0) on every rank' if name == "seed" else ""
            raise ReplicaError(f"the {name} must be the same on every rank", per_rank(values), fix, shared=True, code=9)
    if any(card[7] for card in cards):
        if comm.rank == 0:
            print(f"hvdtrain: preempted before the training began: exit code {PREEMPTED_CODE}", file=sys.stderr)
        raise Preempted
    hosts = list(dict.fromkeys(card[0] for card in cards))
    who = [(card[0], card[5]) for card in cards]
    return hosts.index(socket.gethostname()), start(comm.rank, comm.size, cards[0][4], listener, who)
