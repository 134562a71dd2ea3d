"""A job, and the plan for it: each rank's host, network interface and variables. Pure."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hvdtrain.cluster.hosts.addresses import Chosen, Interfaces, choose, interfaces, joined
from hvdtrain.cluster.hosts.hosts import Host, Slot, assign
from hvdtrain.cluster.hosts.protocol import Message
from hvdtrain.cluster.hosts.ssh import Ssh
from hvdtrain.cluster.launch import environment
from hvdtrain.comm.arrival import check_interface
from hvdtrain.core.errors import ConfigError


def working_directory() -> str:
    """Returns the working directory; raises ConfigError if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        rule = "ranks need the working directory of the launcher"
        raise ConfigError(rule, "the directory was removed", "cd to a directory that exists") from None


@dataclass(frozen=True)
class Timeouts:
    """The time limits after which the launcher ends a job, in seconds.

    Example:
        hvdtrain.run(train, np=2, timeouts=hvdtrain.Timeouts(start_s=60, grace_s=10))

    Attributes:
        start_s: until every host's agent answers.
        lost_s: how long a host, or the launcher, may send nothing.
        stopped_s: how long a rank may be stopped (SIGSTOP).
        grace_s: between SIGTERM and SIGKILL.
    """

    start_s: float = 20.0
    lost_s: float = 15.0
    stopped_s: float = 15.0
    grace_s: float = 5.0


@dataclass(frozen=True)
class ElasticOptions:
    """The limits within which a job may shrink and grow."""

    minimum: int  # ranks
    maximum: int
    timeout_s: float = 600.0  # how long to run with fewer
    discovery: tuple[str, ...] | None = None  # a command that prints the usable hosts; None: the job's own


@dataclass(frozen=True)
class Job:
    """The job to run. `given`: the data that every rank reads from its standard input; None: no input. With it each
    rank may also write lines to the descriptor in HVDTRAIN_RESULT_FD, which arrive as stream "result". The rank has
    failed unless the last of them is `rank.RETURNED`."""

    argv: Sequence[str]  # the command of every rank
    hosts: Sequence[Host]  # in the order that ranks are assigned
    np: int
    env: Mapping[str, str] = field(default_factory=dict)  # wins over what the ranks' host has
    cwd: str = field(default_factory=working_directory)  # of the ranks, on every host
    python: str = sys.executable  # the interpreter of the agents, on every host
    ssh: Ssh = field(default_factory=Ssh)
    network: str | None = None  # "10.0.0.0/24", or an address in it; None: chosen
    horovod: bool = True  # serve Horovod's rendezvous, on the first host
    timeouts: Timeouts = field(default_factory=Timeouts)
    given: bytes | None = field(default=None, repr=False)
    elastic: ElasticOptions | None = None  # None: it ends with the first rank that fails

    @functools.cached_property
    def slots(self) -> list[Slot]:
        """Returns the ranks' places, in rank order; raises ConfigError if there are fewer slots than ranks."""
        return assign(self.hosts, self.np)

    @functools.cached_property
    def ranks(self) -> Counter[Host]:
        """Returns how many ranks each host gets, in order; hosts without ranks are not in it."""
        return Counter(slot.host for slot in self.slots)

    @property
    def one_host(self) -> bool:
        """Returns True if all ranks are on one host, and stay there."""
        more = self.elastic is not None and (self.elastic.discovery is not None or len(self.hosts) > 1)
        return len(self.ranks) == 1 and not more


@dataclass(frozen=True)
class JobPlan:
    """The plan of a job: the host, addresses, cores and variables of each rank."""

    job: Job
    chosen: Mapping[str, Chosen]  # by host
    cores: Mapping[str, float]  # by host: that it gives the job
    # variables that log-ins set on some hosts only, or differently; and the hosts that have them
    differing: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: Sequence[str] = ()  # on the addresses that were chosen

    @property
    def hosts(self) -> list[Host]:
        """Returns the hosts that ranks run on, in order."""
        return list(self.job.ranks)

    @property
    def first(self) -> Chosen:
        """Returns the address of rank 0's host."""
        return self.chosen[self.job.slots[0].host.name]

    def of_host(self, host: Host) -> list[Slot]:
        return [slot for slot in self.job.slots if slot.host == host]

    def defaults(self, host: Host) -> dict[str, str]:
        """Returns the default variables of a host's ranks; the host's own and the user's take precedence."""
        elastic = self.job.elastic
        local_size = self.job.ranks[host] if elastic is None else min(host.slots, elastic.maximum)
        return environment.defaults(self.cores[host.name], local_size)

    def with_host(self, host: Host, hello: Message) -> JobPlan:
        """Returns the plan with a host that joins; raises ConfigError if it has no address in the ranks' network."""
        name, its = host.name, interfaces(hello["interfaces"])
        chosen = joined(name, its, self.job.network or self.first.network, hello["reached"])
        cores = {**self.cores, name: float(hello["cores"])}
        return dataclasses.replace(self, chosen={**self.chosen, name: chosen}, cores=cores)

    def variables(self, host: Host, rendezvous_port: int | None, master_port: int) -> dict[str, str]:
        """Returns the variables that all ranks of a host get."""
        job = environment.of_job(self.first, rendezvous_port, master_port)
        horovod = {name: value for name, value in job.items() if name.startswith("HOROVOD_")}
        # the user's word counts, but not on where this job's rendezvous is
        own = environment.of_host(self.chosen[host.name])
        if "HOROVOD_GLOO_IFACE" in self.job.env:
            own.pop("HOROVOD_GLOO_ADDRESS")
        return {**own, **job, **self.job.env, **horovod}


def make_plan(
    job: Job, hellos: Mapping[str, Message], reached: Mapping[str, str], local: Collection[str] = ()
) -> JobPlan:
    """Returns the plan for a job on hosts whose agents have sent their `hellos`; pure. `reached`: the known addresses
    of hosts; `local`: the name of this machine, if it is one of them. Raises `ConfigError` if the hosts share no
    network, or one lacks the interface for Gloo."""
    found = {name: interfaces(hello["interfaces"]) for name, hello in hellos.items()}
    for name, hello in hellos.items() if job.horovod else ():
        check_interface(job.env, name, hello.get("interface_names", list(found[name])))
    chosen = choose(found, job.network, reached, more=not job.one_host)
    cores = {name: float(hello["cores"]) for name, hello in hellos.items()}
    own = {name: {} if name in local else hello.get("own", {}) for name, hello in hellos.items()}
    differing = environment.on_some_hosts_only(own, job.env)
    return JobPlan(job, chosen, cores, differing, list(_notes(found, chosen)))


def _notes(found: Mapping[str, Interfaces], chosen: Mapping[str, Chosen]) -> Iterator[str]:
    for name, its in chosen.items():
        first = str(found[name][its.interface][0].ip)
        if first != its.address:
            yield (
                f"{name}: {its.address} is not the first address of {its.interface} ({first}): Horovod's Gloo uses"
                " it, as hvdtrain build-horovod builds it; NCCL and torch.distributed take a name, and so the first"
            )
