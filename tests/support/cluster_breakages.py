"""Ways to break a cluster of three hosts, one fault each, and all that `hvdtrain doctor` must find then."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cluster_hosts import Cluster
from harness import REPOSITORY

CORES = len(os.sched_getaffinity(0))
HOSTS = "host1:1,host2:1,host3:1"
SITE_PACKAGES = Path(sys.prefix, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")


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


WARNINGS = {"slots-over-cores", "horovod-without-mpi", "run-dir-not-shared", "slow-link"}
BROKEN: dict[str, Broken] = {}
Break = Callable[[Cluster], Iterator[None]]


def broken(found: dict[str, list[str]], fix: str, *flags: str, **more: str) -> Callable[[Break], Break]:
    """Register a way to break a cluster; it is named after its function."""

    def add(function: Break) -> Break:
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


@broken({"ssh-unreachable": ["host3"]}, "ip route get host3", "--fast")
def link_cut(c: Cluster) -> Iterator[None]:
    with c.cut("host3"):
        yield


def known_hosts(c: Cluster) -> Path:
    return c.home("host1") / ".ssh" / "known_hosts"


@broken({"ssh-unknown-host-key": ["host3"]}, "ssh_setup.sh host3", "--fast")
def unknown_host_key(c: Cluster) -> Iterator[None]:
    with changed(known_hosts(c), lambda text: text.replace("host3,10.77.0.13", "nobody")):
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
        sh(c, "host2", f"echo '# a local change' >> {REPOSITORY}/hvdtrain/core/lr.py")
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


@broken({"small-shared-memory": ["host3"]}, "--shm-size")
def small_shared_memory(c: Cluster) -> Iterator[None]:
    """And a shell that greets, and a home folder with a module that has the name of one of Python's."""
    with (
        changed(c.home("host3") / ".bashrc", lambda text: f"echo welcome\n{text}"),
        changed(c.home("host3") / "socket.py", lambda text: "raise ImportError('not the one')"),
    ):
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


@broken({"no-folder": ["host2"]}, "rsync -a", "--fast", "--run-dir", str(REPOSITORY), cwd="{shared}")
def no_such_folder(c: Cluster) -> Iterator[None]:
    with c.tmpfs("host2", c.folder / "data"):
        yield


@broken({"no-common-network": []}, "--network", "--network", "10.99.0.0/24")
def no_common_network(c: Cluster) -> Iterator[None]:
    yield


@broken({"slow-link": ["host2", "host3"]}, "ethtool eth0")
def slow_link(c: Cluster) -> Iterator[None]:
    limit = ["rate", "50mbit", "burst", "64kb", "latency", "200ms"]
    done = c.run("host2", ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit])
    if done.returncode != 0:
        pytest.skip(f"this kernel slows no link here: {done.err.strip()}")
    yield
    sh(c, "host2", "tc qdisc del dev eth0 root")
