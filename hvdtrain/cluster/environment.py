"""Which variables a rank gets: those of the user that concern training, the job's own, and defaults; pure.

They travel through the agent's standard input, never in a command line that others on the host can read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hvdtrain.cluster.addresses import Chosen
from hvdtrain.cluster.hosts import Slot
from hvdtrain.errors import ConfigError

PASSED = re.compile(
    r"(HVDTRAIN|HOROVOD|NCCL|GLOO|OMP|GOMP|KMP|MKL|OPENBLAS|KERAS|TF|XLA|TORCH|PYTORCH|CUDA)_.*"
    r"|PYTHON[A-Z]*|PATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|LANG|LC_[A-Z]+|TZ"
)
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
# what belongs to one job only, this one or one around it
_OF_A_JOB = re.compile(r"HOROVOD_(HOSTNAME|RANK|SIZE|(LOCAL|CROSS)_(RANK|SIZE)|GLOO_RENDEZVOUS_.*)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# how long a rank waits for others that still import their framework; Horovod's own 30 s are short for a cold file
# system. The stall check warns after a minute, as Horovod does, and ends the job after 10, which Horovod never does.
DEFAULTS = {
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "60",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "600",
    "PYTHONUNBUFFERED": "1",
    # OpenMP's idle threads spin by default, on cores that Horovod's own thread needs
    "OMP_WAIT_POLICY": "PASSIVE",
}


def passed(environ: Mapping[str, str], asked: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables of `environ` that every rank gets.

    Args:
        environ: the launcher's own environment.
        asked: what the user asked for beyond the rule (`PASSED`, less names that look secret): "NAME" or "NAME=VALUE".

    Raises:
        ConfigError: "NAME" is not set, or is no name.
    """
    found = {
        name: value
        for name, value in environ.items()
        if PASSED.fullmatch(name) and not SECRET.search(name) and not _OF_A_JOB.fullmatch(name)
    }
    for text in asked:
        name, equals, value = text.partition("=")
        if not _VARIABLE.fullmatch(name):
            raise ConfigError("-x passes a variable: NAME or NAME=VALUE", repr(name), "-x NAME")
        if not equals and name not in environ:
            raise ConfigError("-x NAME passes a variable that is set here", f"{name} is not", f"-x {name}=VALUE")
        found[name] = value if equals else environ[name]
    return found


def defaults(cores: float, local_size: int) -> dict[str, str]:
    """Return what holds unless the user, or the host, says otherwise.

    Args:
        cores: that the host gives the job.
        local_size: ranks that share them: with a thread per core in each, they would fight.
    """
    threads = str(max(1, int(cores) // local_size))
    return DEFAULTS | dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), threads)


def of_rank(slot: Slot) -> dict[str, str]:
    """Return what tells a rank its place, as horovodrun does."""
    return {
        "HOROVOD_HOSTNAME": slot.host.address,
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
    }


def of_host(own: Chosen) -> dict[str, str]:
    """Return what makes the libraries of one host talk through its own interface, whatever its name there.

    "=" makes NCCL take the name exactly; without, "eth1" means eth10 too (NCCL's documentation, NCCL_SOCKET_IFNAME).
    """
    return {
        "HOROVOD_GLOO_IFACE": own.interface,
        "GLOO_SOCKET_IFNAME": own.interface,
        "NCCL_SOCKET_IFNAME": f"={own.interface}",
    }


def of_job(first: Chosen, rendezvous_port: int | None, master_port: int) -> dict[str, str]:
    """Return what all ranks share: where Horovod's rendezvous is, and where a torch.distributed group may meet.

    Args:
        first: what the host of rank 0 talks through.
        rendezvous_port: there; None: the ranks do not use Horovod.
        master_port: for rank 0 to listen on, if it wants to.
    """
    meeting = {"MASTER_ADDR": first.address, "MASTER_PORT": str(master_port)}
    if rendezvous_port is None:
        return meeting
    return meeting | {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": first.address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(rendezvous_port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
