"""Reads from the environment which launcher started this process, as which rank, and with which GPUs.

Launchers nest: `mpirun` inside a Slurm allocation, `horovodrun` inside `srun`, `torchrun` inside OpenPAI. The outer
one's variables stay visible, so the table goes from the innermost to the outermost, and the first match wins. A
launcher that left only some of its variables is an error, never a world of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from hvdtrain.core import variables
from hvdtrain.core.errors import ConfigError, LauncherError
from hvdtrain.core.slurm import expand, port_of, tasks_per_node

Environ = Mapping[str, str]
UNKNOWN_NODE = -1
_MASTER = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Detected:
    """A process's place in the job, from the launcher. `node`: index of its host (`UNKNOWN_NODE` under Open MPI, and
    under hydra on several hosts). `rendezvous`: "host:port", or None if the launcher gives none."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    rendezvous: str | None


ALONE = Detected("none", 0, 1, 0, 1, 0, None)


def detect(environ: Environ) -> Detected:
    """Returns this process's place from the variables of the innermost launcher in `environ`; pure.

    Example:
        place = hvdtrain.detect(os.environ)
        print(place.launcher, place.rank, place.size)

    Raises:
        LauncherError: variables of a launcher are missing or contradict each other; the message names them.
    """
    for _, started, read in _TABLE:
        if started(environ):
            return _checked(read(environ))
    return ALONE


def _any_of(*names: str) -> Callable[[Environ], bool]:
    return lambda environ: any(name in environ for name in names)


_PREFIXES: dict[str, tuple[str, ...]] = {
    "horovodrun": ("HOROVOD_",),
    "mpirun": ("OMPI_COMM_WORLD_", "PMI_", "MPI_LOCAL"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_"),
    "openpai": ("PAI_",),
}


@dataclass(frozen=True)
class _Variables:
    """The variables of a launcher. Names are alternatives, most exact first; `hint`: the remedy if all are missing."""

    environ: Environ
    launcher: str
    hint: str = ""

    def text(self, *names: str) -> str:
        return self.environ[self._first(names)]

    def number(self, *names: str) -> int:
        name = self._first(names)
        text = self.environ[name]
        if not re.fullmatch(r"\d+", text.strip()):
            raise LauncherError(f"{name} (set by {self.launcher}) must be a whole number >= 0", f"{name}={text!r}")
        return int(text)

    def rendezvous(self, size: int, host: str, *ports: str) -> str | None:
        """Returns "host:port", which several ranks need."""
        return f"{self.text(host)}:{self.number(*ports)}" if size > 1 else None

    def _first(self, names: tuple[str, ...]) -> str:
        for name in names:
            if self.environ.get(name, "") != "":
                return name
        present = sorted(name for name in self.environ if name.startswith(_PREFIXES.get(self.launcher, ("\0",))))
        raise LauncherError(
            f"{self.launcher} must set {' or '.join(names)}",
            f"{names[0]} is missing; set are: {', '.join(present) or 'none'}",
            self.hint or f"start the program through {self.launcher}, or unset its variables to train in one process",
        )


def _checked(found: Detected) -> Detected:
    """Refuses numbers that contradict each other."""
    ok = (
        0 <= found.rank < found.size
        and 0 <= found.local_rank < found.local_size <= found.size
        and found.local_rank <= found.rank
    )
    if not ok:
        raise LauncherError(
            f"{found.launcher} must give rank < size, local rank < local size <= size, local rank <= rank",
            f"rank {found.rank} of {found.size}, local rank {found.local_rank} of {found.local_size}",
            "unset variables left over from another launcher, or start again through one launcher",
        )
    return found


# -- horovodrun over Gloo (also Horovod on Spark and Ray) ----------------------------------------------------
def _horovodrun(environ: Environ) -> Detected:
    its = _Variables(environ, "horovodrun")
    rank, size, local_rank, local_size = (
        its.number(f"HOROVOD_{what}") for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    rendezvous = its.rendezvous(size, "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
    node = its.number("HOROVOD_CROSS_RANK") if local_size < size else 0
    return Detected("horovodrun", rank, size, local_rank, local_size, node, rendezvous)


# -- torchrun (and DeepSpeed's launcher, which sets the same names but LOCAL_SIZE) ---------------------------
def _torchrun(environ: Environ) -> Detected:
    hint = (
        "start the program through `torchrun --nnodes ... --nproc-per-node ...` (one per node),"
        " or unset RANK, WORLD_SIZE and LOCAL_RANK to train in one process"
    )
    its = _Variables(environ, "torchrun", hint)
    rank, size, local_rank = map(its.number, ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local_size = its.number("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
    rendezvous = its.rendezvous(size, *_MASTER)
    node = its.number("GROUP_RANK", "CROSS_RANK") if local_size < size else 0
    return Detected("torchrun", rank, size, local_rank, local_size, node, rendezvous)


# -- mpirun: Open MPI, and MPICH / Intel MPI (hydra); the same inside a Kubernetes MPIJob --------------------
def _mpi(*names: str) -> Callable[[Environ], Detected]:
    """Returns what reads rank, size, local rank and local size from these variables."""

    def read(environ: Environ) -> Detected:
        its = _Variables(environ, "mpirun")
        rank, size, local_rank, local_size = map(its.number, names)
        # OMPI_COMM_WORLD_NODE_RANK is a rank within the node, not the node's index: nothing in the environment has that
        node = 0 if local_size == size else UNKNOWN_NODE
        return Detected("mpirun", rank, size, local_rank, local_size, node, None)

    return read


_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))


def _hydra_started(environ: Environ) -> bool:
    """hydra sets PMI_* and MPI_LOCAL*; `srun --mpi=pmi2` sets PMI_* too, and then Slurm is the launcher."""
    its_own = _any_of("MPI_LOCALRANKID", "MPI_LOCALNRANKS")(environ)
    return its_own or (_any_of("PMI_RANK", "PMI_SIZE")(environ) and not _in_slurm_step(environ))


def _mpijob_without_mpirun(environ: Environ) -> Detected:
    raise LauncherError(
        "an MPIJob must start the program through mpirun or horovodrun",
        f"K_MPI_JOB_ROLE={environ['K_MPI_JOB_ROLE']!r}, but OMPI_COMM_WORLD_RANK is missing",
        "make the launcher's command `mpirun -np N python ...`; to train here alone: unset K_MPI_JOB_ROLE",
    )


# -- OpenPAI: one task is one container; ranks = task index x processes a task + local rank ------------------
_PAI_TASK = ("PAI_TASK_INDEX", "PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX")


def _openpai(environ: Environ) -> Detected:
    its = _Variables(environ, "openpai")
    role = environ.get("PAI_CURRENT_TASK_ROLE_NAME", "worker")
    task = its.number(*_PAI_TASK)
    counts = (f"PAI_TASK_ROLE_TASK_COUNT_{role}", "PAI_CURRENT_TASK_ROLE_TASK_COUNT")
    # older OpenPAI does not say the role's number of tasks, but names every task's host
    hosts = sum(re.fullmatch(rf"PAI_HOST_IP_{re.escape(role)}_\d+", name) is not None for name in environ)
    tasks = its.number(*counts) if _any_of(*counts)(environ) or not hosts else hosts
    local_rank, local_size = 0, 1
    gpus = environ.get("PAI_CURRENT_TASK_ROLE_GPU_COUNT", "")
    if "LOCAL_RANK" in environ or (gpus.isdigit() and int(gpus) > 1):
        hint = (
            "start one process a GPU: `torchrun --nnodes $PAI_CURRENT_TASK_ROLE_TASK_COUNT"
            " --node-rank $PAI_TASK_INDEX ...`; for one process a task: LOCAL_RANK=0 LOCAL_WORLD_SIZE=1"
        )
        of_task = _Variables(environ, "openpai", hint)
        local_rank = of_task.number("LOCAL_RANK")
        local_size = of_task.number("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
    size = tasks * local_size
    ports = (f"PAI_{role}_0_SynPort_PORT", f"PAI_PORT_LIST_{role}_0_SynPort")
    rendezvous = its.rendezvous(size, f"PAI_HOST_IP_{role}_0", *ports)
    return Detected("openpai", task * local_size + local_rank, size, local_rank, local_size, task, rendezvous)


# -- srun ----------------------------------------------------------------------------------------------------
def _in_slurm_step(environ: Environ) -> bool:
    """Returns True if `srun` started this process. `sbatch` and `salloc` also set SLURM_PROCID and SLURM_NTASKS, for
    their own shell: only a numbered step is srun's. Steps from 0xfffffff0 up are Slurm's own (batch script, shell)."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < 0xFFFFFFF0


def _srun(environ: Environ) -> Detected:
    its = _Variables(environ, "srun")
    rank = its.number("SLURM_PROCID")
    size = its.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    local_rank = its.number("SLURM_LOCALID")
    if size == 1:
        return Detected("srun", rank, size, local_rank, 1, 0, None)
    node = its.number("SLURM_NODEID")
    tasks = its.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    per_node = tasks_per_node(tasks)
    if len(per_node) == 1:
        per_node = per_node * (node + 1)  # SLURM_NTASKS_PER_NODE=4: the same on every node
    if node >= len(per_node):
        raise LauncherError("srun must give the tasks of every node", f"SLURM_NODEID={node}, tasks per node {tasks!r}")
    return Detected("srun", rank, size, local_rank, per_node[node], node, _srun_rendezvous(its))


def _srun_rendezvous(its: _Variables) -> str | None:
    """Returns rank 0's address: the step's first node, as Slurm numbers tasks from there, and a port of the step's own,
    unless the batch script exports MASTER_ADDR and MASTER_PORT. None if Slurm's variables do not suffice: MPI, and so
    Horovod, needs no address (`meeting_point` names what is missing to those that need one)."""
    environ = its.environ
    nodes = environ.get("SLURM_STEP_NODELIST", "").strip()  # not the job's: a step may start on a later node
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    address = environ.get("MASTER_ADDR", "") or (expand(nodes)[0] if nodes else "")
    if not address or not (environ.get("MASTER_PORT") or job):
        return None
    port = its.number("MASTER_PORT") if environ.get("MASTER_PORT") else port_of(job, step)
    return f"{address}:{port}"


# -- launchers nobody has tested with hvdtrain ---------------------------------------------------------------
# rank and size variables of PMIx (prterun), Cray PALS and ALPS, Flux, IBM's jsrun, MVAPICH2
_UNKNOWN_LAUNCHERS = {
    "PMIX_RANK": "PMIX_SIZE",
    "PALS_RANKID": "PALS_SIZE",
    "ALPS_APP_PE": "ALPS_APP_SIZE",
    "FLUX_TASK_RANK": "FLUX_JOB_SIZE",
    "JSM_NAMESPACE_RANK": "JSM_NAMESPACE_SIZE",
    "MV2_COMM_WORLD_RANK": "MV2_COMM_WORLD_SIZE",
}


def _stranger(environ: Environ) -> Detected:
    """Refuses an unknown launcher: each rank would train alone, as a world of one, and look like a real training."""
    rank = next(name for name in _UNKNOWN_LAUNCHERS if name in environ)
    size = environ.get(_UNKNOWN_LAUNCHERS[rank])
    if size == "1":
        return ALONE
    raise LauncherError(
        "the program must be started by a launcher hvdtrain knows: horovodrun, mpirun, srun, torchrun",
        f"{rank}={environ[rank]!r}, {_UNKNOWN_LAUNCHERS[rank]}={size!r}",
        f"start it by one of them (mpirun works inside most others), or unset {rank} to train alone",
        code=6,
    )


# whose it is, whether it has started this process, and what it says
_TABLE: tuple[tuple[str, Callable[[Environ], bool], Callable[[Environ], Detected]], ...] = (
    ("horovodrun", _any_of("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_GLOO_RENDEZVOUS_ADDR"), _horovodrun),
    ("torchrun", _any_of("TORCHELASTIC_RUN_ID"), _torchrun),
    ("mpirun", _any_of(*_OPEN_MPI[:2]), _mpi(*_OPEN_MPI)),
    ("mpirun", _hydra_started, _mpi("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    ("mpirun", _any_of("K_MPI_JOB_ROLE"), _mpijob_without_mpirun),
    ("srun", _in_slurm_step, _srun),
    ("openpai", _any_of(*_PAI_TASK), _openpai),
    # set by hand or by DeepSpeed: the names are common words, so everything more specific comes first
    ("torchrun", _any_of("RANK", "WORLD_SIZE", "LOCAL_RANK"), _torchrun),
    ("none", _any_of(*_UNKNOWN_LAUNCHERS), _stranger),
)
LAUNCHERS = tuple(dict.fromkeys(launcher for launcher, _, _ in _TABLE))


_JOB_VARIABLES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")  # mpirun's: what differs from job to job


def meeting_point(environ: Environ, detected: Detected, *, join: int = 0) -> tuple[str, int] | Literal["rendezvous"]:
    """Returns the host and port at which rank 0 of a torch.distributed group listens; "rendezvous": on a free port that
    it sends through the launcher's server (horovodrun, `hvdtrain launch`); pure.

    It is the launcher's own rendezvous (torchrun, OpenPAI, srun), else MASTER_ADDR and MASTER_PORT. Under mpirun, if
    all ranks are on this host, it is a port of the job's `join`th group: the last group's store may still exist. Raises
    `LauncherError` with the missing variables.
    """
    if detected.rendezvous is not None and detected.launcher != "horovodrun":  # there it is the launcher's own server
        address, _, port = detected.rendezvous.rpartition(":")
        return address, int(port)
    given = [environ[name] for name in _MASTER if environ.get(name)]
    made_up = [(detected.rendezvous or "").rpartition(":")[0], environ.get(variables.MASTER_PORT)]
    if len(given) == 2 and given != made_up:
        return environ["MASTER_ADDR"], _Variables(environ, detected.launcher).number("MASTER_PORT")
    one_host = detected.local_size == detected.size
    # one of the two, on several hosts: the other was forgotten
    if detected.rendezvous is not None and (one_host or len(given) != 1):
        return "rendezvous"
    job = [environ[name] for name in _JOB_VARIABLES if environ.get(name)]
    if job and one_host and detected.launcher == "mpirun":
        return "127.0.0.1", port_of(*job, *([str(join)] if join else []))
    needed = ("SLURM_STEP_NODELIST", "SLURM_JOB_ID") if detected.launcher == "srun" else _MASTER
    missing = [name for name in needed if not environ.get(name)]
    raise LauncherError(
        f"a torch.distributed group under {detected.launcher} needs {' and '.join(needed)}, to find rank 0",
        f"{' and '.join(missing)} missing",
        "start the ranks through torchrun;\n"
        "or on every rank: export MASTER_ADDR=<the host of rank 0> MASTER_PORT=29500\n"
        "(mpirun: -x MASTER_ADDR -x MASTER_PORT)",
    )


def gpus_for(local_rank: int, local_size: int, visible: int, per_rank: int = 1) -> tuple[int, ...]:
    """Returns the GPUs of one rank, as indices among the visible GPUs; empty if none is visible; pure.

    If all ranks of a host see all its GPUs, rank r takes the r-th group. If the launcher masks them (`srun
    --gpus-per-task`, CUDA_VISIBLE_DEVICES per rank), a rank sees exactly its own.

    Example:
        gpus = hvdtrain.gpus_for(local_rank=1, local_size=2, visible=4, per_rank=2)  # (2, 3)

    Raises:
        LauncherError: too few GPUs for the ranks on this host.
        ConfigError: an argument is out of range.
    """
    if per_rank < 1 or visible < 0 or not 0 <= local_rank < local_size:
        raise ConfigError(
            "need per_rank >= 1, visible >= 0 and 0 <= local_rank < local_size",
            f"per_rank={per_rank}, visible={visible}, local_rank={local_rank}, local_size={local_size}",
        )
    if visible == 0:
        return ()
    if visible >= local_size * per_rank:
        return tuple(range(local_rank * per_rank, (local_rank + 1) * per_rank))
    if visible == per_rank:
        return tuple(range(per_rank))
    raise LauncherError(
        f"{local_size} ranks on a host with {per_rank} GPU(s) each need {local_size * per_rank} GPUs",
        f"{visible} visible to local rank {local_rank}",
        f"start at most {max(visible // per_rank, 1)} rank(s) on this host,\n"
        "or show more GPUs (CUDA_VISIBLE_DEVICES), or train with device='cpu'",
        code=5,
    )


# A job that Slurm requeues after a preemption, or that `hvdtrain launch --max-restarts` starts again after a failure,
# runs the same command line as before: the programs go on with the job's own run without being told to.
def restarts(environ: Environ) -> int:
    """Returns how often this job was restarted; pure. HVDTRAIN_RESTART counts, else sbatch's SLURM_RESTART_COUNT.
    Raises `LauncherError` unless it is a whole number."""
    name = next((name for name in (variables.RESTART, "SLURM_RESTART_COUNT") if environ.get(name, "") != ""), None)
    if name is None:
        return 0
    if not (environ[name].isascii() and environ[name].isdigit()):
        raise LauncherError(
            f"{name} must be a whole number: how often the job was restarted", repr(environ[name]), f"unset {name}"
        )
    return int(environ[name])


def job_of(environ: Environ) -> str | None:
    """Returns what names this job, the same each time it is started; None where nothing does; pure."""
    if environ.get(variables.JOB):
        return environ[variables.JOB]
    job = environ.get("SLURM_JOB_ID")
    return f"slurm-{environ.get('SLURM_CLUSTER_NAME') or 'cluster'}-{job}" if job else None
