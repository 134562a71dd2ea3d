"""Which variables a rank gets: the user's, the job's own, and defaults; the same on every host; pure.

They travel through the agent's standard input, never in a command line that others on the host can read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.cluster.hosts import probe
from hvdtrain.cluster.hosts.addresses import Chosen
from hvdtrain.cluster.hosts.hosts import Slot
from hvdtrain.core import variables
from hvdtrain.core.errors import ConfigError

_SECRET_VALUE = re.compile(r"://[^/\s:@]*:[^/\s@]+@")  # a password in a URL
# what is true of one host, one log-in, one terminal or one process only: another host's ranks have their own
_OF_A_HOST = re.compile(
    r"HOME|USER|LOGNAME|USERNAME|SHELL|SHLVL|PWD|OLDPWD|_|MAIL|HOSTNAME|HOST|HOSTTYPE|TMP|TEMP|TMPDIR|PS[0-9]|PROMPT.*"
    r"|TERM|TERM_.*|TERMINFO.*|COLORTERM|COLUMNS|LINES|LS_COLORS|TMUX.*|STY|WINDOW|WINDOWID|VTE_VERSION|VSCODE_.*"
    r"|SSH_.*|XDG_.*|DBUS_.*|DISPLAY|WAYLAND_DISPLAY|XAUTHORITY|SESSION_MANAGER|DESKTOP_SESSION|GPG_.*|KRB5CCNAME"
    r"|SUDO_.*|INVOCATION_ID|JOURNAL_STREAM|NOTIFY_SOCKET|LISTEN_.*|MANAGERPID|SYSTEMD_.*|MEMORY_PRESSURE_.*"
    r"|container|KUBERNETES_.*|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES)|PYTEST_.*"
)
# what other launchers tell a process about its place in another job
_OF_A_LAUNCHER = re.compile(
    r"HOROVOD_(HOSTNAME|RANK|SIZE|(LOCAL|CROSS)_(RANK|SIZE)|GLOO_ADDRESS|GLOO_RENDEZVOUS_.*)"
    r"|SLURM.*|SLURMD_.*|SRUN_.*|PMI_.*|PMIX_.*|MPI_LOCAL.*|HYDRA_.*|K_MPI_JOB_.*|PAI_.*"
    r"|OMPI_(COMM_WORLD|UNIVERSE|APP|FIRST|FILE|NUM|ARGV|COMMAND)_.*|OMPI_MCA_(orte|ess|pmix|mpi_yield|initial_wdir)_?.*|PRTE_.*"
    r"|RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_(RANK|SIZE|WORLD_SIZE|NAME)|TORCHELASTIC_.*"
    rf"|{variables.RESTART}|{variables.JOB}|{variables.MASTER_PORT}|{variables.AGENT_FD}|{variables.ELASTIC}.*"
)
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


def is_secret(name: str, value: str = "") -> bool:
    """Returns True if a variable looks as if it held a secret; ranks get such a variable only on request."""
    return bool(probe.SECRET.search(name) or _SECRET_VALUE.search(value))


def is_of_a_host(name: str) -> bool:
    """Returns True if a variable belongs to one host, log-in, terminal or process, or to another launcher's job."""
    named = _VARIABLE.fullmatch(name) is not None  # else: a shell's exported function
    return not named or bool(_OF_A_HOST.fullmatch(name) or _OF_A_LAUNCHER.fullmatch(name))


def passed(environ: Mapping[str, str], asked: Sequence[str] = (), env_file: str | Path | None = None) -> dict[str, str]:
    """Returns the variables of `environ` that every rank gets, on whatever host: all but a host's own and secrets.

    Args:
        environ: the launcher's own environment.
        asked: what the user asked for beyond the rule: "NAME" or "NAME=VALUE".
        env_file: a file with a "NAME=VALUE" or "NAME" a line; `asked` wins over it.

    Raises:
        ConfigError: "NAME" is not set, or is no name; the file cannot be read.
    """
    found = {name: value for name, value in environ.items() if not is_of_a_host(name) and not is_secret(name, value)}
    lines = _lines(Path(env_file)) if env_file is not None else []
    for where, text in [*lines, *(("-x", text) for text in asked)]:
        name, equals, value = text.partition("=")
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(f"{where} needs a variable: NAME or NAME=VALUE", repr(name), "-x NAME")
        if not equals and name not in environ:
            raise ConfigError(f"{where} NAME needs a variable that is set", f"{name} is not set", f"-x {name}=VALUE")
        found[name] = value if equals else environ[name]
    return found


def _lines(path: Path) -> list[tuple[str, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--env-file must be readable text", f"{path}: {error}", "NAME=VALUE, a line each") from error
    lines = enumerate(text.splitlines(), 1)
    return [(f"{path}, line {number}:", line) for number, line in lines if line.strip() and line[0] != "#"]


def withheld(environ: Mapping[str, str], env: Mapping[str, str]) -> list[str]:
    """Returns the variables that ranks do not get because they look secret, by name; nor must they inherit them."""
    return sorted(name for name in environ if name not in env and not is_of_a_host(name))


def on_some_hosts_only(own: Mapping[str, Mapping[str, str]], env: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns variables that log-ins set on some hosts only, or differently, and which hosts have them.

    Args:
        own: {host: {name: digest of the value}}.
        env: what every rank gets; it wins over a host's own.
    """
    names = sorted({name for its in own.values() for name in its if name not in env})
    return {
        name: [host for host, its in own.items() if name in its]
        for name in names
        if len({its.get(name) for its in own.values()}) > 1
    }


def defaults(cores: float, local_size: int) -> dict[str, str]:
    """Returns what ranks get unless the user, or the host, sets it: cores // ranks threads each."""
    threads = str(max(1, int(cores) // local_size))
    return DEFAULTS | dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), threads)


def of_rank(slot: Slot) -> dict[str, str]:
    """Returns the variables that hold a rank's place, as horovodrun sets them."""
    places = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    numbers = {f"HOROVOD_{name.upper()}": str(getattr(slot, name)) for name in places}
    return {"HOROVOD_HOSTNAME": slot.host.address} | numbers


def of_host(own: Chosen) -> dict[str, str]:
    """Returns what makes the libraries of one host talk through its own interface.

    A name means the first address of the interface; Horovod's Gloo, as the recipe builds it, takes the address.
    "=" makes NCCL take the name exactly; without, "eth1" means eth10 too (NCCL's documentation, NCCL_SOCKET_IFNAME).
    """
    return {
        "HOROVOD_GLOO_IFACE": own.interface,
        "HOROVOD_GLOO_ADDRESS": own.address,
        "GLOO_SOCKET_IFNAME": own.interface,
        "NCCL_SOCKET_IFNAME": f"={own.interface}",
    }


def of_job(first: Chosen, rendezvous_port: int | None, master_port: int) -> dict[str, str]:
    """Returns what all ranks share: where Horovod's rendezvous is, and where a torch.distributed group may meet.

    `rendezvous_port`: on the `first` host; None: the ranks do not use Horovod.
    """
    meeting = {"MASTER_ADDR": first.address, "MASTER_PORT": str(master_port), variables.MASTER_PORT: str(master_port)}
    if rendezvous_port is None:
        return meeting
    return meeting | {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": first.address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(rendezvous_port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
