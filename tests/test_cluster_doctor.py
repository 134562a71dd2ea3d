"""`hvdtrain doctor` on clusters that are really broken, one way each: named, with its fix, in under 10 s.

Everything else must be left unsaid: a test compares all that was found, not only what it looks for.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from cluster_hosts import Cluster, cluster
from harness import REPOSITORY

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
LIMIT_S = 10.0
CORES = len(os.sched_getaffinity(0))
HOSTS = "host1:1,host2:1,host3:1"
SITE_PACKAGES = Path(sys.prefix, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")


@dataclass(frozen=True)
class Report:
    """What the doctor said: `found` is {id: hosts} of everything but notes."""

    code: int
    data: dict
    seconds: float

    @property
    def found(self) -> dict[str, list[str]]:
        return {item["id"]: item["hosts"] for item in self.data["findings"] if item["severity"] != "note"}

    def of(self, id_: str) -> dict:
        return next(item for item in self.data["findings"] if item["id"] == id_)


def examine(c: Cluster, *flags: str | Path, hosts: str = HOSTS, cwd: Path = REPOSITORY, live: bool = False) -> Report:
    """Run the doctor on host1."""
    command = [sys.executable, "-m", "hvdtrain.cli", "doctor", "-H", hosts, "--json", *flags]
    done = c.run("host1", command + ["--no-live"] * (not live), cwd=cwd)
    assert done.returncode in (0, 1, 2) and done.out.startswith("{"), done.text
    return Report(done.returncode, json.loads(done.out), done.seconds)


@pytest.fixture(scope="module")
def c() -> Iterator[Cluster]:
    with cluster(3) as made:
        shared(made).mkdir(parents=True)
        (made.folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (made.folder / "python").chmod(0o755)
        yield made
        assert made.left_after(5) == []


# -- a healthy cluster ----------------------------------------------------------------------------------------
def test_healthy() -> None:
    """4 hosts, everything asked, a real all-reduce: nothing to say, and nothing left behind."""
    with cluster(4) as four:
        command = [sys.executable, "-m", "hvdtrain.cli", "doctor", "-H", "host1:1,host2:1,host3:1,host4:1"]
        quick = four.run("host1", [*command, "--no-live"]).check()
        assert quick.seconds < LIMIT_S / 2, quick.text
        done = four.run("host1", [*command, "--json"])
        report = Report(done.returncode, json.loads(done.out), done.seconds)
        left = four.left_after(2)
    assert quick.out.splitlines()[-1].startswith("nothing to say: 4 host(s), 4 rank(s)"), quick.out
    assert report.data["findings"] == [] and report.code == 0
    live, flows = report.data["live"], report.data["network"]["flows"]
    assert (live["size"], live["failed"]) == (4, "") and live["seconds"] > 0
    assert [flow["bytes"] > 0 and flow["seconds"] > 0 for flow in flows] == [True] * 4
    assert sum(len(replies) for replies in report.data["network"]["reach"].values()) == 4 * 3
    # importing PyTorch four times is what takes long where four hosts share two cores, as here
    assert report.seconds - report.data["seconds_by_part"]["live"] < LIMIT_S / 2
    assert left == []


def test_fast_is_fast(c: Cluster) -> None:
    report = examine(c, "--fast")
    assert (report.found, report.code) == ({}, 0)
    assert report.data["seconds"] < 5, "what hvdtrain launch waits for at every start"


def test_this_machine(c: Cluster) -> None:
    """Without -H there is no ssh, and nothing but this machine."""
    with c.sshd("host1", "stop"):
        done = c.run("host1", [sys.executable, "-m", "hvdtrain.cli", "doctor"]).check()
    assert "nothing to say: 1 host(s), 1 rank(s)" in done.out
    assert "live all-reduce: 2 ranks" in done.out


# -- broken ones ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Broken:
    """A way to break a cluster, and all that must be found.

    Attributes:
        what: breaks it, and mends it again.
        found: {id: hosts}.
        fix: words of the fix of the first finding.
        flags: of the doctor.
        hosts: as given to -H.
        cwd: that the doctor is called in.
    """

    what: Callable[[Cluster], AbstractContextManager[object]]
    found: dict[str, list[str]]
    fix: str
    flags: list[str] = field(default_factory=list)
    hosts: str = HOSTS
    cwd: str = str(REPOSITORY)

    @property
    def code(self) -> int:
        return 1 if set(self.found) <= WARNINGS else 2


WARNINGS = {
    "slots-over-cores", "horovod-without-mpi", "clock-skew", "run-dir-not-shared", "mtu-differs", "slow-link",
    "no-such-interface",
}  # fmt: skip
BROKEN: dict[str, Broken] = {}


def broken(found: dict[str, list[str]], fix: str, *flags: str, **more: str) -> Callable:
    """Register a way to break a cluster; it is named after its function."""

    def add(function: Callable) -> Callable:
        BROKEN[function.__name__] = Broken(contextmanager(function), found, fix, list(flags), **more)
        return function

    return add


def sh(c: Cluster, host: str, *lines: str) -> None:
    c.run(host, ["bash", "-ec", "\n".join(lines)]).check()


def shared(c: Cluster) -> Path:
    """A folder that all hosts have, until a test hides it from one of them."""
    return c.folder / "data" / "job"


@contextmanager
def changed(path: Path, change: Callable[[str], str]) -> Iterator[None]:
    """A file of a host, changed from outside."""
    before = path.read_text() if path.exists() else None
    path.write_text(change(before or ""))
    try:
        yield
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_text(before)


@contextmanager
def own_copy(c: Cluster, host: str, folder: Path) -> Iterator[None]:
    """Let a host change what is in a folder, unseen by the others."""
    place = f"/run/copy-{time.monotonic_ns()}"
    options = f"lowerdir={folder},upperdir={place}/upper,workdir={place}/work"
    sh(c, host, f"mkdir -p {place}/upper {place}/work")
    done = c.run(host, ["mount", "-t", "overlay", "overlay", "-o", options, folder])
    if done.returncode != 0:
        pytest.skip(f"this kernel mounts no overlay here: {done.err.strip()}")
    try:
        yield
    finally:
        c.unmount(host, folder)


@broken({"no-route": ["host2", "host3"]}, "ip route get 10.77.0.13")
def no_route(c: Cluster) -> Iterator[None]:
    sh(c, "host2", "ip route add unreachable 10.77.0.13")
    yield
    sh(c, "host2", "ip route del unreachable 10.77.0.13")


@broken({"closed-port": ["host3", "host1", "host2"]}, "iptables -I INPUT -p tcp -s 10.77.0.11,10.77.0.12 -j ACCEPT")
def closed_port(c: Cluster) -> Iterator[None]:
    """As a firewall that lets ssh through and drops the rest."""
    dropped = "from all to 10.77.0.13 ipproto tcp dport 1024-65534"
    sh(c, "host3", "ip rule add pref 10 lookup local", "ip rule del pref 0", f"ip rule add pref 5 {dropped} blackhole")
    yield
    sh(c, "host3", "ip rule del pref 5", "ip rule add pref 0 lookup local", "ip rule del pref 10")


@broken({"ssh-refused": ["host2"]}, "systemctl start ssh", "--fast")
def sshd_stopped(c: Cluster) -> Iterator[None]:
    with c.sshd("host2", "stop"):
        yield


@broken({"ssh-timeout": ["host2"]}, "sshd")
def accepts_and_never_answers(c: Cluster) -> Iterator[None]:
    with c.sshd("host2", "hang"):
        yield


@broken({"ssh-unreachable": ["host3"]}, "ip route get host3", "--fast")
def link_cut(c: Cluster) -> Iterator[None]:
    with c.cut("host3"):
        yield


@broken({"ssh-unknown-name": ["nowhere"]}, "getent hosts nowhere", hosts="host1:1,nowhere:1")
def unknown_name(c: Cluster) -> Iterator[None]:
    yield


def known_hosts(c: Cluster) -> Path:
    return c.home("host1") / ".ssh" / "known_hosts"


@broken({"ssh-unknown-host-key": ["host2"]}, "ssh_setup.sh host2", "--fast")
def unknown_host_key(c: Cluster) -> Iterator[None]:
    with changed(known_hosts(c), lambda text: text.replace("host2,10.77.0.12", "nobody")):
        yield


@broken({"ssh-changed-host-key": ["host2"]}, "ssh-keygen -R host2", "--fast")
def changed_host_key(c: Cluster) -> Iterator[None]:
    with changed(known_hosts(c), lambda text: text.replace("host2,10.77.0.12", "x").replace("host3,", "host2,host3,")):
        yield


@broken({"ssh-denied": ["host2"]}, "ssh-copy-id host2", "--fast")
def no_key(c: Cluster) -> Iterator[None]:
    with changed(c.home("host2") / ".ssh" / "authorized_keys", lambda text: ""):
        yield


def other_python(wanted: Callable[[tuple[int, ...]], bool]) -> str:
    """An installed interpreter whose version is wanted; skips the test if there is none."""
    versions = [f"python3.{minor}" for minor in range(6, 16)] + ["python3", "python2.7", "python2"]
    places = [*Path.home().glob(".pyenv/versions/*/bin/python"), *map(Path, filter(None, map(shutil.which, versions)))]
    for place in places:
        code = "import sys; print('%d %d %d' % sys.version_info[:3])"
        done = subprocess.run([place, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode == 0 and wanted(tuple(map(int, done.stdout.split()))):
            return str(place)
    pytest.skip("no such Python is installed here")


@contextmanager
def python_of(c: Cluster, host: str, interpreter: str) -> Iterator[None]:
    """Let one host's Python be another."""
    wrapper = c.folder / "python"
    other = c.folder / "python-other"
    other.write_text(f'#!/bin/sh\nexec {interpreter} "$@"\n')
    other.chmod(0o755)
    with c.bind(host, other, wrapper):
        yield


@broken({"python-differs": ["host2"]}, "same path", "--python", "{folder}/python")
def older_python(c: Cluster) -> Iterator[None]:
    with python_of(c, "host2", other_python(lambda version: (3, 6) <= version < (3, 11))):
        yield


@broken({"no-python": ["host2"]}, "--python PATH", "--python", "{folder}/python")
def python_2(c: Cluster) -> Iterator[None]:
    with python_of(c, "host2", other_python(lambda version: version < (3, 6))):
        yield


@broken({"no-python": ["host2"]}, "--python PATH", "--fast", "--python", "{folder}/python")
def no_python(c: Cluster) -> Iterator[None]:
    with python_of(c, "host2", "/nowhere/python"):
        yield


@broken({"torch-differs": ["host2"], "horovod-other-torch": ["host2"]}, "-m pip install torch==", "--fast")
def other_torch(c: Cluster) -> Iterator[None]:
    with own_copy(c, "host2", SITE_PACKAGES):
        sh(c, "host2", f"sed -i -E \"s/^(__version__.*= ').*'/\\12.11.0+cu130'/\" {SITE_PACKAGES}/torch/version.py")
        yield


@broken({"no-horovod": ["host3"]}, "build-horovod --install", "--fast")
def no_horovod(c: Cluster) -> Iterator[None]:
    with own_copy(c, "host3", SITE_PACKAGES):
        sh(c, "host3", f"rm -r {SITE_PACKAGES}/horovod {SITE_PACKAGES}/horovod-*")
        yield


@broken({"no-hvdtrain": ["host3"]}, "--python PATH", "--fast")
def no_hvdtrain(c: Cluster) -> Iterator[None]:
    with own_copy(c, "host3", REPOSITORY / "hvdtrain"):
        sh(c, "host3", f"rm -r {REPOSITORY}/hvdtrain/*")
        yield


@broken({"horovod-without-mpi": ["host2"]}, "--mpi on")
def horovod_without_mpi(c: Cluster) -> Iterator[None]:
    """Its extensions have the class that talks MPI if they were built with it; here that class is renamed."""
    with own_copy(c, "host2", SITE_PACKAGES / "horovod"):
        files = f"{SITE_PACKAGES}/horovod/*/mpi_lib*.so"
        sh(c, "host2", f"sed -i s/horovod6common13MPIController/horovod6common13XXXController/g {files}")
        yield


@broken({"mpi-library-missing": ["host2"]}, "openmpi", "--fast")
def mpi_library_missing(c: Cluster) -> Iterator[None]:
    found = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    paths = [line.split("=> ")[1] for line in found.splitlines() if line.strip().startswith("libmpi.so.")]
    if not paths:
        pytest.skip("no Open MPI here, nor in this Horovod")
    with c.bind("host2", "/dev/null", Path(paths[0]).resolve()):
        yield


@broken({"hvdtrain-differs": ["host2"]}, "rsync -a --delete", "--fast")
def other_sources(c: Cluster) -> Iterator[None]:
    with own_copy(c, "host2", REPOSITORY / "hvdtrain"):
        sh(c, "host2", f"echo '# a local change' >> {REPOSITORY}/hvdtrain/lr.py")
        yield


@broken({"duplicate-names": ["host1", "host2"]}, "hostnamectl set-hostname host2", "--fast")
def duplicate_names(c: Cluster) -> Iterator[None]:
    sh(c, "host2", "hostname host1")
    yield
    sh(c, "host2", "hostname host2")


@broken({"same-machine": ["host2", "other"]}, "-H host2:2", "--fast", hosts="host1:1,host2:1,other:1")
def same_machine_twice(c: Cluster) -> Iterator[None]:
    with (
        changed(c.etc("host1") / "hosts", lambda text: text.replace("10.77.0.12 host2", "10.77.0.12 host2 other")),
        changed(known_hosts(c), lambda text: text.replace("host2,", "host2,other,")),
    ):
        yield


@broken({"slots-over-cores": ["host2"]}, "host2:", hosts=f"host1:1,host2:{CORES + 1}")
def too_many_slots(c: Cluster) -> Iterator[None]:
    yield


@broken({"small-shared-memory": ["host3"]}, "--shm-size")
def small_shared_memory(c: Cluster) -> Iterator[None]:
    sh(c, "host3", "mount -o remount,size=8m /dev/shm")
    yield
    sh(c, "host3", "mount -o remount,size=50% /dev/shm")


@broken({"run-dir-not-writable": ["host1"]}, "--run-dir DIR", "--run-dir", "{shared}/runs")
def run_dir_read_only(c: Cluster) -> Iterator[None]:
    with c.tmpfs("host1", shared(c), read_only=True):
        yield


@broken({"run-dir-not-shared": ["host2"]}, "NFS", "--run-dir", "{shared}")
def run_dir_not_shared(c: Cluster) -> Iterator[None]:
    with c.tmpfs("host2", shared(c)):
        yield


@broken({"full-disk": ["host1"]}, "du -xhd1", "--run-dir", "{shared}")
def full_disk(c: Cluster) -> Iterator[None]:
    with c.tmpfs("host1", shared(c), size_bytes=1 << 20):
        c.run("host1", ["dd", "if=/dev/zero", f"of={shared(c)}/full", "bs=64k"])  # until no more goes in
        yield


@broken({"full-disk": ["host3"]}, "du -xhd1 /tmp")
def full_temporary_folder(c: Cluster) -> Iterator[None]:
    with c.tmpfs("host3", Path("/tmp"), size_bytes=1 << 20):
        yield


@broken({"clock-skew": ["host2"]}, "timedatectl set-ntp true")
def clock_skew(c: Cluster) -> Iterator[None]:
    with c.clock("host2", 90):
        yield


@broken({"no-folder": ["host2"]}, "rsync -a", "--fast", "--run-dir", str(REPOSITORY), cwd="{shared}")
def no_such_folder(c: Cluster) -> Iterator[None]:
    with c.tmpfs("host2", c.folder / "data"):
        yield


@broken({"no-common-network": []}, "--network", "--network", "10.99.0.0/24")
def no_common_network(c: Cluster) -> Iterator[None]:
    yield


@broken({"mtu-differs": ["host3"]}, "ip link set eth0 mtu 1500")
def other_mtu(c: Cluster) -> Iterator[None]:
    sh(c, "host3", "ip link set eth0 mtu 1400")
    yield
    sh(c, "host3", "ip link set eth0 mtu 1500")


@broken({"slow-link": ["host2", "host3"]}, "ethtool eth0")
def slow_link(c: Cluster) -> Iterator[None]:
    limit = ["rate", "50mbit", "burst", "64kb", "latency", "200ms"]
    done = c.run("host2", ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit])
    if done.returncode != 0:
        pytest.skip(f"this kernel slows no link here: {done.err.strip()}")
    yield
    sh(c, "host2", "tc qdisc del dev eth0 root")


@broken({"no-such-interface": ["host3"]}, "start-up files")
def variables_of_another_cluster(c: Cluster) -> Iterator[None]:
    """And a shell that greets, and a home folder with a module that has the name of one of Python's."""
    with (
        changed(c.home("host3") / ".bashrc", lambda text: f"export NCCL_SOCKET_IFNAME=eth9\necho welcome\n{text}"),
        changed(c.home("host3") / "socket.py", lambda text: "raise ImportError('not the one')"),
    ):
        yield


@pytest.mark.parametrize("way", BROKEN)
def test_broken(c: Cluster, way: str) -> None:
    it = BROKEN[way]
    places = {"folder": str(c.folder), "shared": str(shared(c))}
    with it.what(c):
        flags = [flag.format(**places) for flag in it.flags]
        report = examine(c, *flags, hosts=it.hosts, cwd=Path(it.cwd.format(**places)))
    assert report.found == it.found, json.dumps(report.data["findings"], indent=1)
    assert report.code == it.code
    finding = report.of(next(iter(it.found)))
    assert it.fix in finding["fix"] and finding["what"] and finding["why"]
    assert report.seconds < LIMIT_S


def test_a_greeting_shell_is_noted(c: Cluster) -> None:
    with BROKEN["variables_of_another_cluster"].what(c):
        report = examine(c, hosts="host1:1,host3:1")
    assert "welcome" in report.of("noisy-shell")["what"]


def test_ranks_of_another_job_are_noted(c: Cluster) -> None:
    other = c.popen("host2", ["sleep", "1000"], env={"HOROVOD_RANK": "0"})
    try:
        report = examine(c)
    finally:
        other.kill()
        other.wait()
    assert (report.code, report.found, report.of("other-ranks")["hosts"]) == (0, {}, ["host2"])


def test_one_other_host(c: Cluster) -> None:
    """Its clock is compared as well, and a network of one host is none."""
    with c.clock("host2", 90):
        report = examine(c, hosts="host2:1")
    assert report.found == {"clock-skew": ["host2"]}
    assert report.data["network"]["reach"] == {}


def test_interface_names_are_noted(c: Cluster) -> None:
    """hvdtrain launch goes by addresses, so the job will run."""
    rename = "ip link set {0} down; ip link set {0} name {1}; ip link set {1} up"
    sh(c, "host3", rename.format("eth0", "ens5"))
    try:
        report = examine(c)
    finally:
        sh(c, "host3", rename.format("ens5", "eth0"))
    assert (report.code, report.found) == (0, {})
    assert "host3 ens5" in report.of("interface-names")["what"]


def test_ctrl_c_ends_it_everywhere(c: Cluster) -> None:
    with c.sshd("host3", "hang"):
        command = [sys.executable, "-m", "hvdtrain.cli", "doctor", "-H", HOSTS, "--timeout", "60"]
        process = c.popen("host1", command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 20
            while not c.pids("host2"):  # until the probe is there
                assert time.monotonic() < deadline, c.running()
            process.send_signal(signal.SIGINT)
            started = time.monotonic()
            assert process.wait(20) == 130
            assert time.monotonic() - started < 5, "it waited for a host that hangs"
        finally:
            process.kill()
            process.wait()
        assert psutil.wait_procs(c.pids("host2"), timeout=5)[1] == []


def test_what_only_the_all_reduce_sees(c: Cluster) -> None:
    with own_copy(c, "host2", SITE_PACKAGES / "horovod" / "torch"):
        broken_file = SITE_PACKAGES / "horovod" / "torch" / "__init__.py"
        sh(c, "host2", f"echo 'raise ImportError(\"no such symbol\")' >> {broken_file}")
        report = examine(c, hosts="host1:1,host2:1", live=True)
    assert report.found == {"all-reduce-failed": ["host2"]} and report.code == 2
    assert "no such symbol" in report.of("all-reduce-failed")["what"]


def test_several_things_at_once(c: Cluster) -> None:
    """Each is told, in one go; a host that hangs costs a time-out, not more; the report is one for people."""
    with c.sshd("host3", "hang"), c.clock("host2", -90):
        hosts = f"host1:1,host2:{CORES + 1},host3:1,nowhere:1"
        done = c.run("host1", [sys.executable, "-m", "hvdtrain.cli", "doctor", "-H", hosts])
    assert done.returncode == 2 and done.seconds < LIMIT_S
    heads = [line.split() for line in done.out.splitlines() if line.startswith(("ERROR", "WARNING"))]
    assert [severity for severity, *_ in heads] == ["ERROR"] * 2 + ["WARNING"] * 2, "the worst come first"
    assert {id_.rstrip(":") for _, id_, *_ in heads} == {
        "ssh-timeout", "ssh-unknown-name", "slots-over-cores", "clock-skew"
    }  # fmt: skip
    assert done.out.splitlines()[-1].startswith("2 error(s), 2 warning(s): 4 host(s)")
    assert done.out.count("  fix:") == 4
    assert not c.left_after(5)
