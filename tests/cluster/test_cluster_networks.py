"""Two hosts with a network for ssh and one for ranks: one environment, the address that was asked for, cut networks."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster_breakages import changed, sh
from cluster_hosts import Cluster, cluster
from harness import PROGRAMS, Result

from hvdtrain.cluster.hosts.data_path import GIVEN_UP_S, DataPath

TOY = PROGRAMS / "cluster" / "toy.py"
LAUNCH = ["hvdtrain", "launch", "-H", "host1:1,host2:1"]
RANKS_NET, SECOND = "10.78.0.0/24", "10.79.0.0/24"
# prints the addresses that this rank talks to other ranks from
MEET = """
import os, horovod.torch as hvd, psutil, torch
hvd.init()
total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
both = [(c.laddr.ip, c.raddr.ip) for c in psutil.Process().net_connections("tcp") if c.status == "ESTABLISHED"]
print("talks", total, *sorted({ip for ends in both for ip in ends}), flush=True)
hvd.shutdown()
"""
LOST_S, GRACE_S, BUSY_S = 3.0, 1.0, 10.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster(2, networks=2) as c:
        yield c


def launch(c: Cluster, folder: Path, *flags: str, command: list[str], env: dict[str, str] | None = None) -> Result:
    line = [*LAUNCH, "--log-dir", str(folder / "logs"), *flags, "--", *command]
    done = c.run("host1", line, env=env, cwd=folder, timeout_s=120)
    assert c.left_after(3) == [], done.text
    return done


def toy(*actions: str) -> list[str]:
    return [sys.executable, str(TOY), *actions]


def test_all_ranks_get_the_same_environment(hosts: Cluster, tmp_path: Path, limit) -> None:
    """LR=0.5 once reached rank 0 alone, as did any variable whose name says nothing of training."""
    given = {"LR": "0.5", "DATA_DIR": "/data", "HF_TOKEN": "hunter2", "TMPDIR": "/tmp"}
    names = ["LR", "DATA_DIR", "HF_TOKEN", "TMPDIR", "MINE"]
    with changed(hosts.home("host2") / ".bashrc", lambda text: f"export MINE=1 LR=0.1\n{text}"):
        done = launch(hosts, tmp_path, "--no-checks", command=toy(*(f"*:show:{name}" for name in names)), env=given)
    done.check()
    of = {rank: re.findall(rf"^\[{rank} \S+\] (\S+=.*)$", done.out, re.MULTILINE) for rank in (0, 1)}
    assert of[0] == ["LR=0.5", "DATA_DIR=/data", "HF_TOKEN=None", "TMPDIR=/tmp", "MINE=None"], done.text
    assert of[1] == ["LR=0.5", "DATA_DIR=/data", "HF_TOKEN=None", "TMPDIR=None", "MINE=1"], done.text
    assert "because they look secret (-x NAME passes one): HF_TOKEN" in done.err and "hunter2" not in done.text
    assert "set by the log-in on host2 itself: MINE" in done.err, done.text
    limit("C1a", "LR=0.5 hvdtrain launch -H host1:1,host2:1", mended="0.5 on both ranks; what is left out is said")


def test_every_address_of_an_interface_has_its_own_network(hosts: Cluster) -> None:
    """Also the second one, and that of an alias (eth0:1), which is one of the interface itself."""
    added = [["10.90.0.1/20"], ["10.91.0.1/16", "label", "lo:1"]]
    program = (
        "from hvdtrain.cluster.hosts.addresses import interfaces; from hvdtrain.cluster.hosts import probe;"
        " print(*interfaces(probe.interfaces())['lo'])"
    )
    try:
        for words in added:
            hosts.run("host1", ["ip", "address", "add", *words, "dev", "lo"]).check()
        done = hosts.run("host1", [sys.executable, "-c", program]).check()
    finally:
        for address, *_ in added:
            hosts.run("host1", ["ip", "address", "delete", address, "dev", "lo"])
    assert done.out.split() == ["127.0.0.1/8", "10.90.0.1/20", "10.91.0.1/16"]


def test_gloo_listens_at_the_address_that_was_asked_for(hosts: Cluster, tmp_path: Path, limit) -> None:
    """The second address of an interface: a name would mean the first."""
    program = [sys.executable, "-c", MEET]
    for host in hosts.hosts:
        sh(hosts, host, f"ip addr add {hosts.address(host, 1).replace('10.78', '10.79')}/24 dev eth1")
    try:
        done = launch(hosts, tmp_path, "--no-checks", "--network", SECOND, command=program).check()
    finally:
        for host in hosts.hosts:
            sh(hosts, host, f"ip addr del {hosts.address(host, 1).replace('10.78', '10.79')}/24 dev eth1")
    talks = [line.partition("talks ")[2] for line in done.out.splitlines()]
    assert talks == ["2.0 10.79.0.11 10.79.0.12"] * 2, done.text
    assert "is not the first address of eth1" in done.err
    limit(
        "C3a", "--network with an address that is not its interface's first", mended="ranks meet there and only there"
    )


@contextmanager
def running(c: Cluster, folder: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    limits = ["--lost-after", f"{LOST_S:g}", "--grace", f"{GRACE_S:g}", "--network", RANKS_NET, "--no-checks"]
    line = [*LAUNCH, *limits, "--log-dir", str(folder / "logs"), *flags, "--", *toy("*:wait:100")]
    with (folder / "output").open("wb") as output:
        job = c.popen("host1", line, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield job
        finally:
            job.kill()
            job.wait()
            c.end_all()


def until(folder: Path, *texts: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not all(text in (folder / "output").read_text() for text in texts):
        assert time.monotonic() < deadline, (folder / "output").read_text()
        time.sleep(0.05)


def ended(c: Cluster, folder: Path, job: subprocess.Popen[bytes], code: int) -> str:
    """The last words of a job that must end in time, because of its limits."""
    assert job.wait(LOST_S + 6 + GRACE_S + 2 + BUSY_S) == code, (folder / "output").read_text()
    assert c.left_after(5) == []
    text = (folder / "output").read_text()
    return text[text.rindex("hvdtrain launch: ") :]


def test_the_ranks_network_is_cut_while_ssh_lives(hosts: Cluster, tmp_path: Path, limit) -> None:
    with running(hosts, tmp_path) as job:
        until(tmp_path, "[0 host1] waiting", "[1 host2] waiting")
        hosts._ip("link set host2.1 down\n")
        try:
            last = ended(hosts, tmp_path, job, 255)
        finally:
            hosts._ip("link set host2.1 up\n")
    assert "host2 has not reached host1 through the ranks' network" in last and "may be the reason" in last
    limit("C13a", "the data network is cut while ssh lives", mended=last.splitlines()[0])


@pytest.mark.thorough
def test_a_firewall_in_front_of_rank_0(hosts: Cluster, tmp_path: Path, limit) -> None:
    dropped = f"from all to {hosts.address('host1', 1)} ipproto tcp dport 1024-65534"
    sh(
        hosts, "host1", "ip rule add pref 10 lookup local", "ip rule del pref 0",
        f"ip rule add pref 5 {dropped} blackhole",
    )  # fmt: skip
    try:
        with running(hosts, tmp_path) as job:
            last = ended(hosts, tmp_path, job, 255)
    finally:
        sh(hosts, "host1", "ip rule del pref 5", "ip rule add pref 0 lookup local", "ip rule del pref 10")
    assert "host2 has not reached host1 through the ranks' network" in last and "firewall" in last
    limit("C13b", "a firewall in front of rank 0 lets only ssh through", mended=last.splitlines()[0])


def test_a_host_that_stays_away_ends_the_job_as_lost(hosts: Cluster, tmp_path: Path, limit) -> None:
    """And not as refused (2), though it is the checks before the restart that it does not pass."""
    flags = ["--max-restarts", "1", "--restart-wait", "0", "--start-timeout", "3"]
    with running(hosts, tmp_path, *flags) as job:
        until(tmp_path, "[0 host1] waiting", "[1 host2] waiting")
        with hosts.cut("host2"):
            assert job.wait(60) == 255, (tmp_path / "output").read_text()
            assert hosts.left_after(20) == []
    assert "not started again" in (tmp_path / "output").read_text()
    limit("C13c", "a host is gone for longer than --restart-wait", mended="exit code 255, and why it was not restarted")


def test_keys_that_ssh_was_told_not_to_check_are_checked(hosts: Cluster, tmp_path: Path, limit) -> None:
    ssh = hosts.home("host1") / ".ssh"
    with (
        changed(ssh / "known_hosts", lambda text: text.replace("host2,10.77.0.12", "nobody")),
        changed(ssh / "config", lambda text: f"Host *\n  StrictHostKeyChecking no\n{text}"),
    ):
        done = launch(hosts, tmp_path, "--no-checks", command=["true"])
    assert done.returncode == 2 and "host key is not known here" in done.err, done.text
    limit("C11b", "StrictHostKeyChecking no in the user's ssh configuration", refused=done.err)


@pytest.mark.parametrize(
    ("before", "shell", "said"),
    [
        ("", "/usr/sbin/nologin", "run no commands"),
        pytest.param('command="date" ', "/bin/bash", "did not run the command", marks=pytest.mark.thorough),
    ],
)
def test_what_a_restricted_log_in_says_is_told(hosts: Cluster, tmp_path: Path, before, shell, said, limit) -> None:
    with (
        changed(hosts.etc("host2") / "passwd", lambda text: text.replace(":/bin/bash", f":{shell}", 1)),
        changed(hosts.home("host2") / ".ssh" / "authorized_keys", lambda text: before + text),
    ):
        done = launch(hosts, tmp_path, "--no-checks", command=["true"])
        found = hosts.run("host1", ["hvdtrain", "doctor", "--fast", "-H", "host1:1,host2:1"])
    assert done.returncode == 2 and said in done.err, done.text
    assert said in " ".join(found.out.split()), found.text
    limit("C12f", f"a log-in on a host with {before.strip() or shell}", refused=done.err)


def test_the_data_path_without_hosts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        path = DataPath("127.0.0.1", server.getsockname())
        assert min(path.unreached_s(103.0) for _ in range(2)) == 0.0  # begun, then made
    assert min(path.unreached_s(106.0) for _ in range(2)) == 0.0, "refused is an answer as well"
    nowhere = DataPath("127.0.0.1", ("192.0.2.1", 9))  # from loopback nothing leaves
    assert [nowhere.unreached_s(100.0 + at) for at in (0, 1, GIVEN_UP_S + 1)] == [0, 1, GIVEN_UP_S + 1]
    path.peer = nowhere.peer
    assert [path.unreached_s(106.0 + at) for at in (1.9, 2, 4)] == [0, 0, 2], "not since it was reached last"
    nowhere.close()
    path.close()
