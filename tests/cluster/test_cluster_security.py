"""What a job under `hvdtrain launch` shows to others: who may connect, who may read its secrets, what a name can do."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from cluster_hosts import Cluster, cluster
from cluster_procfs import connected
from harness import PROGRAMS

STEPS = PROGRAMS / "cluster" / "steps.py"
LAUNCH = ["hvdtrain", "launch", "-np", "2", "-H", "host1:1,host2:1"]
SSHD = {("0.0.0.0", 22), ("::", 22)}
NOT_ASKED_FOR, ASKED_FOR = "sesame-that-stays", "sesame-that-travels"
SECRETS = {"HVDTRAIN_API_TOKEN": NOT_ASKED_FOR, "AWS_SECRET_ACCESS_KEY": NOT_ASKED_FOR, "DATA_PASSWORD": ASKED_FOR}
NETWORK = "10.78.0.0/24"  # the second one of the hosts
START_S = 120  # until ranks have imported their framework, on a busy machine


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster(2, networks=2) as c:
        yield c


@dataclass
class Seen:
    """What could be seen of a job from outside.

    Attributes:
        at_any_time: (host, address, port) of all that listened, from the job's begin to its end, besides sshd.
        in_training: the same, while all ranks trained.
        connections: addresses of both ends, while all ranks trained, besides those with sshd.
        scanned: the ports of host1 that host2 could connect to.
        commands: command lines of everything that ran on the hosts.
        environs: of the ranks.
        written: every file and line the launcher wrote.
    """

    at_any_time: set[tuple[str, str, int]] = field(default_factory=set)
    in_training: set[tuple[str, str, int]] = field(default_factory=set)
    connections: set[tuple[str, str]] = field(default_factory=set)
    scanned: list[int] = field(default_factory=list)
    commands: set[str] = field(default_factory=set)
    environs: list[dict[str, str]] = field(default_factory=list)
    written: str = ""


def listening(c: Cluster) -> set[tuple[str, str, int]]:
    return {(host, *place) for host in c.hosts for place in c.listening(host) - SSHD}


SCAN = """
import socket, sys
found = []
for port in range(1, 65536):
    with socket.socket() as attempt:
        attempt.settimeout(2)
        if attempt.connect_ex((sys.argv[1], port)) == 0:
            found.append(port)
print(found)
"""


def look(c: Cluster, seen: Seen) -> None:
    for host in c.hosts:
        for process in c.pids(host):
            try:
                seen.commands.add(" ".join(process.cmdline()))
            except psutil.NoSuchProcess:
                continue
    seen.at_any_time |= listening(c)


@pytest.fixture(scope="module")
def seen(hosts: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """A job on the second network, looked at all the time."""
    folder, seen = tmp_path_factory.mktemp("job"), Seen()
    flags = ["--network", NETWORK, "-x", "DATA_PASSWORD", "--log-dir", f"{folder}/logs"]
    with (folder / "output").open("wb") as output:
        job = hosts.popen(
            "host1", [*LAUNCH, *flags, "--", sys.executable, STEPS, folder], env=SECRETS,
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_S
        while not all((folder / f"rank-{rank}").exists() for rank in range(2)):
            look(hosts, seen)
            assert time.monotonic() < deadline and job.poll() is None, (folder / "output").read_text()
        seen.in_training = listening(hosts)
        for host in hosts.hosts:
            both_ends = connected(hosts.hosts[host].pid or 0)
            seen.connections |= {(ours[0], its[0]) for ours, its in both_ends if 22 not in (ours[1], its[1])}
        scan = [sys.executable, "-I", "-S", "-c", SCAN, hosts.address("host1", 1)]
        seen.scanned = ast.literal_eval(hosts.run("host2", scan).check().out)
        ranks = [process for host in hosts.hosts for process in hosts.pids(host) if str(STEPS) in process.cmdline()[:2]]
        seen.environs = [process.environ() for process in ranks]
        (folder / "finish").touch()
        while job.poll() is None:
            look(hosts, seen)
        assert job.returncode == 0, (folder / "output").read_text()
    finally:
        job.kill()
        job.wait()
        hosts.end_all()
    dry = hosts.run("host1", [*LAUNCH, *flags, "--dry-run", "--", "true"], env=SECRETS).check()
    logs = [file.read_text() for file in sorted((folder / "logs").iterdir())]
    assert len(logs) >= 3, "both ranks', and the launcher's record"
    seen.written = "\n".join([(folder / "output").read_text(), dry.text, *logs, *map(hosts.sshd_log, hosts.hosts)])
    return seen


def test_only_the_rendezvous_listens_and_only_on_the_chosen_network(seen: Seen, hosts: Cluster) -> None:
    ((host, address, port),) = seen.in_training
    assert (host, address) == ("host1", hosts.address("host1", 1))
    # while they find each other, ranks listen as well: on addresses of the hosts, never for everybody
    known = {(name, hosts.address(name, network)) for name in hosts.hosts for network in (0, 1)}
    assert {place[:2] for place in seen.at_any_time} <= known
    assert seen.scanned == sorted([22, port])


def test_ranks_talk_through_the_chosen_network_alone(seen: Seen, hosts: Cluster) -> None:
    chosen = {hosts.address(host, 1) for host in hosts.hosts}
    assert seen.connections
    assert {address for ends in seen.connections for address in ends} <= chosen


def test_secrets_reach_the_ranks_if_asked_for_and_nobody_else(seen: Seen) -> None:
    assert len(seen.environs) == 2
    for environ in seen.environs:
        assert environ["DATA_PASSWORD"] == ASKED_FOR
        on_host1 = environ["HOROVOD_CROSS_RANK"] == "0"
        assert on_host1 or not {"HVDTRAIN_API_TOKEN", "AWS_SECRET_ACCESS_KEY"} & environ.keys()
    assert any("hvdtrain.cluster.launch.agent" in line for line in seen.commands)
    for line in seen.commands:
        assert "sesame" not in line and "HOROVOD_" not in line, "command lines can be read by everybody on a host"
    assert "DATA_PASSWORD=(not shown)" in seen.written
    assert "sesame" not in seen.written


WORDS = ["a b", "$(touch it); `touch it` | touch it & 'touch' \"it\"", "*", "-x", "\\", "\t é", ""]


def test_words_arrive_as_they_were_given(hosts: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s a $(touch it) "folder";'
    folder.mkdir()
    code = "import os, sys; print([os.getcwd(), *sys.argv[1:]])"
    launch = ["hvdtrain", "launch", "-H", "host1:1,host2:1", "--log-dir", f"{tmp_path}/logs", "--quiet", "--"]
    done = hosts.run("host1", [*launch, sys.executable, "-c", code, *WORDS], cwd=folder).check()
    for rank in (0, 1):
        log = (tmp_path / "logs" / f"rank-{rank:04d}.log").read_text()
        line = next(line for line in log.splitlines() if "[" in line)
        assert ast.literal_eval(line[line.index("[") :]) == [str(folder), *WORDS], done.text
    assert list(folder.iterdir()) == []
