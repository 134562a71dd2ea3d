"""Which hosts take part, with how many ranks each, and which rank runs where: text in, values out."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.slurm import job_hosts

# Names reach `ssh` as an argument and files as a part of their names: nothing else than what host names are made of,
# and no leading "-", which would make an option of them.
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?[A-Za-z0-9_][A-Za-z0-9._-]*")
_HOSTS = 'hosts must be written as host1:4,host2:4, with names of letters, digits, ".", "_" and "-"'
_FIX = "-H host1:4,host2:4 (host1 has 1 slot); with users: user@host1:4; addresses: 10.0.0.1:4"
MOST_RANKS = 100_000  # of a job: a larger number is a typing error
_SETTING = re.compile(r"\s+(slots|max[_-]slots)\s*=\s*(\S+)")  # as Open MPI has them


@dataclass(frozen=True)
class Host:
    """A machine that ranks run on."""

    name: str  # as the user wrote it, perhaps with "user@" in front: what ssh is called with
    slots: int = 1

    @property
    def address(self) -> str:
        """Returns the name without a user: what the resolver knows."""
        return self.name.rpartition("@")[2]

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


@dataclass(frozen=True)
class Slot:
    """A rank's place in the job, numbered as Horovod does."""

    host: Host
    rank: int
    size: int
    local_rank: int  # among the ranks of the host
    local_size: int
    cross_rank: int  # among the ranks of all hosts that have the same local rank
    cross_size: int


def parse_hosts(text: str) -> list[Host]:
    """Returns the hosts in "host1:4,host2:4,host3"; raises ConfigError for bad names and slots, and a host twice."""
    return _distinct([_host(piece.strip(), text) for piece in text.split(",")])


def asked_for(listed: str | None, hostfile: Path | None, environ: Mapping[str, str]) -> list[Host] | None:
    """Returns the hosts of -H, of --hostfile, or of the Slurm job around; None: none of them is given.

    Raises ConfigError also for an empty list, which an unset variable makes and which must not mean "here".
    """
    if listed is not None and hostfile is not None:
        raise ConfigError("-H and --hostfile cannot be given together", "both", "give one of them")
    if listed is not None and not listed.strip():
        rule, received = "-H must name at least one host", f"{listed!r}: the variable it comes from may not be set"
        raise ConfigError(rule, received, "-H host1:4,host2:4, or no -H for this machine alone")
    if hostfile is not None:
        return read_hostfile(hostfile)
    given = listed or job_hosts(environ)
    return parse_hosts(given) if given else None


def read_hostfile(path: str | Path) -> list[Host]:
    """Returns the hosts in a file: a line each, "host1 slots=4 max_slots=8" or "host1:4"; "#" starts a comment.

    The slots of a host on several lines add up, as PBS and Open MPI mean it. Raises ConfigError for other lines.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("a host file must be readable text", f"{path}: {error}", "correct --hostfile") from error
    slots: collections.Counter[str] = collections.Counter()
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            host = _host_in_line(text)
        except ConfigError as error:
            raise ConfigError(error.rule, f"{path}, line {number}: {error.received}", error.remedy) from None
        slots[host.name] += host.slots
    if not slots:
        raise ConfigError("a host file must name at least one host", f"{path}: none", "a line each: host1 slots=4")
    return _distinct([Host(name, count) for name, count in slots.items()])


def assign(hosts: Sequence[Host], np: int) -> list[Slot]:
    """Returns the places of `np` ranks: hosts in their order, each filled before the next, as horovodrun does; pure.

    Raises ConfigError if there are fewer slots than ranks, or no ranks.
    """
    slots = sum(host.slots for host in hosts)
    if np > MOST_RANKS:
        raise ConfigError(f"a job cannot have more than {MOST_RANKS:,} ranks", f"-np {np:,}", "give fewer: -np N")
    if not 1 <= np <= slots:
        received = f"-np {np}, {slots} slot(s): {', '.join(map(str, hosts))}"
        each = -(-np // max(len(hosts), 1))
        more = ",".join(f"{host.name}:{max(host.slots, each)}" for host in hosts)
        rule = "a job needs at least 1 rank and a slot for each"
        raise ConfigError(rule, received, f"-np {max(slots, 1)}, or more slots: -H {more}")
    local_sizes, left = [], np
    for host in hosts:
        local_sizes.append(min(host.slots, left))
        left -= local_sizes[-1]
    return numbered(hosts, local_sizes)


def numbered(hosts: Sequence[Host], local_sizes: Sequence[int]) -> list[Slot]:
    """Returns the places of so many ranks on each host, in the hosts' order; pure."""
    cross_sizes = [sum(size > local for size in local_sizes) for local in range(max(local_sizes))]
    met: collections.Counter[int] = collections.Counter()
    found: list[Slot] = []
    for host, local_size in zip(hosts, local_sizes, strict=True):
        for local in range(local_size):
            place = local, local_size, met[local], cross_sizes[local]
            found.append(Slot(host, len(found), sum(local_sizes), *place))
            met[local] += 1
    return found


def _host_in_line(text: str) -> Host:
    """Returns the host in a line of a host file."""
    settings = {name.replace("-", "_"): value for name, value in _SETTING.findall(text)}
    name = _SETTING.sub("", text)
    host = _host(f"{name}:{settings['slots']}" if "slots" in settings else name, text)
    if "max_slots" in settings and _host(f"{host.name}:{settings['max_slots']}", text).slots < host.slots:
        raise ConfigError("max_slots must not be below slots", text, f"{host.name} slots={host.slots}")
    return host


def _host(text: str, whole: str) -> Host:
    """The host in "host1:4" or "host1", a piece of what the user wrote."""
    name, slots = text.rpartition(":")[::2] if ":" in text else (text, "1")
    if not name:
        raise ConfigError(_HOSTS, repr(whole), _FIX)
    if not _NAME.fullmatch(name):
        raise ConfigError(_HOSTS, repr(text), _FIX)
    if not re.fullmatch(r"[0-9]{1,6}", slots) or int(slots) < 1:
        raise ConfigError("the slots of a host must be a whole number, at least 1", f"{name}: {slots!r}", _FIX)
    return Host(name, int(slots))


def _distinct(hosts: list[Host]) -> list[Host]:
    counts = collections.Counter(host.address for host in hosts)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        remedy = "name each host once, with all its slots: " + ",".join(
            f"{name}:{sum(host.slots for host in hosts if host.address == name)}" for name in twice
        )
        raise ConfigError("a host cannot be named more than once", ", ".join(twice), remedy)
    return hosts
