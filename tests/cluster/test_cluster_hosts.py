"""The hosts that other tests stand on: they are apart where hosts are apart, break as told, and never stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cluster_hosts import Cluster, ClusterError, cluster, why_not
from harness import SUPPORT

FAST = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=2"]
MAKES_HOSTS = """
import sys
sys.path.insert(0, {tests!r})
from cluster_hosts import cluster
with cluster(1) as c:
    running = c.popen("host1", ["sleep", "1000"])
    while not c.pids("host1"):
        pass
    print(c.folder, c.room_pid, c.hosts["host1"].pid, c.pids("host1")[0].pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster(2, interfaces=["eth0", "ens5"], shm_bytes=[None, 1 << 20]) as c:
        yield c


def code(text: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", text]


SLEEPS = """
import signal, subprocess
signal.signal(signal.SIGINT, signal.SIG_DFL)
with subprocess.Popen(["sleep", "1000"]):
    print(flush=True)
"""


def sleeps(hosts: Cluster, host: str) -> subprocess.Popen[bytes]:
    """Start two processes there; returns when both run."""
    running = hosts.popen(host, code(SLEEPS), stdout=subprocess.PIPE)
    assert running.stdout is not None
    with running.stdout:
        running.stdout.readline()
    return running


def test_hosts_are_apart_and_see_the_same_files(hosts: Cluster, tmp_path: Path) -> None:
    (tmp_path / "shared").write_text("by all")
    script = f"hostname; cat {tmp_path}/shared; ip -br -4 address; df --output=size /dev/shm; echo ~; ps -e"
    there = hosts.run("host1", ["ssh", *FAST, "host2", script]).check().out
    assert there.startswith("host2\nby all")
    assert "ens5" in there and "10.77.0.12/24" in there and "eth0" not in there
    assert "\n     1024\n" in there
    assert str(hosts.home_inside("host2")) in there
    assert "pytest" not in there, "processes of others are not to be seen"
    assert (hosts.address("host2"), hosts.interface("host2")) == ("10.77.0.12", "ens5")
    assert hosts.listening("host2") == {("0.0.0.0", 22), ("::", 22)}


def test_what_runs_there_is_seen_and_ended(hosts: Cluster) -> None:
    hosts.run("host1", ["ssh", *FAST, "host2", "setsid sleep 1000 >/dev/null 2>&1 < /dev/null &"]).check()
    [seen] = hosts.left_after(0)
    assert seen.startswith("host2: ") and "sleep 1000" in seen, "the shell or setsid may not have become sleep yet"
    hosts.end_all()
    assert hosts.left_after(5) == []


def test_a_command_in_time_or_not_at_all(hosts: Cluster) -> None:
    done = hosts.run(
        "host2", code("import sys; print(input()); print('err', file=sys.stderr); sys.exit(3)"), stdin="in"
    )
    assert (done.returncode, done.out, done.err) == (3, "in\n", "err\n")
    with pytest.raises(ClusterError, match=r"(?s)not done after 0.5 s.*host2: \d+ sleep 1000"):
        hosts.run("host2", ["sleep", "1000"], timeout_s=0.5)
    assert hosts.left_after(5) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_a_command(hosts: Cluster, number: signal.Signals) -> None:
    running = sleeps(hosts, "host1")
    running.send_signal(number)
    assert running.wait(10) == -number
    if number == signal.SIGINT:
        assert hosts.left_after(5) == [], "to the whole group, as from a terminal"
    hosts.end_all()
    assert hosts.left_after(5) == []


def test_a_host_starts_again_as_it_was(hosts: Cluster) -> None:
    running = sleeps(hosts, "host2")
    hosts.power_off("host2")
    assert running.wait(10) == -signal.SIGKILL
    assert hosts.pids("host2") == []
    hosts.boot("host2")
    assert hosts.run("host1", ["ssh", *FAST, "host2", "hostname"]).check().out == "host2\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, None])
def test_nothing_stays_however_the_test_ends(number: signal.Signals | None) -> None:
    if reason := why_not():
        pytest.skip(reason)
    program = [sys.executable, "-c", MAKES_HOSTS.format(tests=str(SUPPORT))]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None and process.stdout is not None
        folder, *pids = process.stdout.readline().decode().split()
        assert all(psutil.pid_exists(int(pid)) for pid in pids) and Path(folder).is_dir()
        if number is None:
            process.stdin.close()
        else:
            process.send_signal(number)
        process.wait(20)
    deadline = time.monotonic() + 10
    while Path(folder).exists() or any(psutil.pid_exists(int(pid)) for pid in pids):
        assert time.monotonic() < deadline, f"{folder}: {os.path.exists(folder)}, processes {pids}"
        time.sleep(0.02)


def test_where_there_can_be_no_hosts_the_reason_is_told() -> None:
    if reason := why_not():
        pytest.skip(reason)
    without = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", "--"]
    program = [sys.executable, "-c", MAKES_HOSTS.format(tests=str(SUPPORT))]
    done = subprocess.run([*without, *program], input="", capture_output=True, text=True, check=False)
    assert "Skipped: hosts for tests are namespaces, which are not allowed here: " in done.stderr
    assert "Operation not permitted" in done.stderr
