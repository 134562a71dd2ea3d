"""Hosts for tests: real Linux hosts in all that matters to a launcher, made of namespaces on this machine.

A host has its own network (address, interfaces, routes), host name, process ids, /dev/shm, /run, /etc (a copy: host
key, known hosts, users) and home folder, and its own sshd, with host-key checking on as anywhere. Files are shared
otherwise, as over NFS, mounts are the host's own. The hosts hang on a switch that leads nowhere else.

    with cluster(2) as c:
        c.run("host1", ["ssh", "host2", "hostname"])
        c.cut("host2")                                  # its cable is pulled
        c.power_off("host2"); c.boot("host2")

The test process stays outside. Nothing is left when it ends, in whatever way (see `cluster_room`); a test that needs
hosts is skipped, with the reason, where they cannot be made.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster_disks import build_tricks, folder_for_disks, furnish, play, program, sshd_command
from cluster_procfs import command_of, is_zombie_or_sshd, listening, namespace, serves_port_22
from harness import REPOSITORY, Result, clean_environment

ROOM = Path(__file__).with_name("cluster_room.py")
ROOM_PROGRAM = [sys.executable, "-I", "-S", str(ROOM)]
NEEDED = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ip": "iproute2",
    "mount": "mount",
    "nsenter": "util-linux",
}
HANGING_SSHD = """
import signal, socket
server = socket.create_server(("", 22), backlog=100)
kept = []
while True:
    kept.append(server.accept())
"""


class ClusterError(AssertionError):
    """A host did not do what a test took for granted."""


@dataclass
class Host:
    """`interfaces`: (name, address with prefix length) of each network; `pid`: of its first process, seen from
    outside, or None while it is powered off."""

    name: str
    interfaces: list[tuple[str, str]]
    pid: int | None = None


@dataclass
class Cluster:
    """Hosts, and what can be done to them. Whatever undoes itself is also a context manager: `with c.cut(host):`."""

    folder: Path
    room_pid: int
    hosts: dict[str, Host]
    boot_socket: socket.socket

    # ---- running commands

    def run(
        self,
        host: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = REPOSITORY,
        timeout_s: float = 60,
        stdin: str = "",
        user: str = "root",
    ) -> Result:
        """Run a command in a host to its end.

        Raises:
            ClusterError: it was not done in time; everything that runs on any host, but sshd, is then killed.
        """
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            # files, not pipes: a process left behind that holds a pipe open would hang us
            given.write(stdin.encode())
            given.seek(0)
            start = time.monotonic()
            process = self.popen(host, argv, env=env, cwd=cwd, user=user, stdin=given, stdout=out, stderr=err)
            late = ""
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                late = "\n".join(self.running())
            finally:
                if process.poll() is None:  # also on Ctrl-C
                    process.kill()
                    process.wait()
            seconds = time.monotonic() - start
            out.seek(0)
            err.seek(0)
            said, complained = (file.read().decode("utf-8", "replace") for file in (out, err))
            done = Result(process.returncode, said, complained, seconds)
        if late:
            self.end_all()
            raise ClusterError(
                f"{host}: {' '.join(map(str, argv))}: not done after {timeout_s} s (killed); ran:\n{late}\n{done.text}"
            )
        return done

    def popen(
        self,
        host: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = REPOSITORY,
        user: str = "root",
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a command in a host. Signals sent to the result reach the command (SIGINT: its process group, as from a
        terminal; kill(): itself), its exit code is the command's."""
        command = [*ROOM_PROGRAM, "enter", str(self._pid(host)), str(cwd)]
        if user != "root":
            command += ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--"]
        options = {"stdin": subprocess.DEVNULL, **options}
        environment = self.environment(env, home=self.home_inside(host, user), user=user)
        return subprocess.Popen([*command, *map(str, argv)], env=environment, start_new_session=True, **options)

    def environment(self, extra: Mapping[str, str] | None = None, *, home: Path, user: str = "root") -> dict[str, str]:
        """What a log-in on a host would have, threads pinned to one, this Python's commands first on the PATH."""
        kept = {name: value for name, value in clean_environment().items() if not name.startswith(("SSH_", "XDG_"))}
        kept["PATH"] = f"{Path(sys.executable).parent}:{kept.get('PATH', os.defpath)}"
        if user == "root":
            # Open MPI's files are named after host and pid, which two clusters at once have in common
            kept["OMPI_MCA_orte_tmpdir_base"] = str(self.folder)
        return {**kept, "HOME": str(home), "USER": user, "LOGNAME": user, **(extra or {})}

    # ---- what is there

    def address(self, host: str, network: int = 0) -> str:
        return self.hosts[host].interfaces[network][1].split("/")[0]

    def interface(self, host: str, network: int = 0) -> str:
        return self.hosts[host].interfaces[network][0]

    def etc(self, host: str) -> Path:
        """The host's own /etc, as a folder that can be written from outside."""
        return self.folder / host / "etc"

    def home(self, host: str, user: str = "root") -> Path:
        """The user's home folder on that host, as a folder that can be written from outside."""
        return self.folder / host / ("home" if user == "root" else user)

    def home_inside(self, host: str, user: str = "root") -> Path:
        """The same, as the host's processes call it: root's has the same name on every host."""
        return self.folder / "home" if user == "root" else self.home(host, user)

    def sshd_log(self, host: str) -> str:
        return (self.folder / host / "sshd.log").read_text()

    def pids(self, host: str) -> list[psutil.Process]:
        """What runs on a host besides its first process and sshd (process ids as seen from outside); zombies, which
        the host's first process has not seen yet, left out."""
        first = self.hosts[host].pid
        if first is None or (inside := namespace(first)) is None:
            return []
        return [
            process
            for process in psutil.process_iter()
            if process.pid != first and namespace(process.pid) == inside and not is_zombie_or_sshd(process)
        ]

    def running(self) -> list[str]:
        """What runs on all hosts, in words: "host1: 123 python train.py"."""
        return [f"{host}: {process.pid} {command_of(process)}" for host in self.hosts for process in self.pids(host)]

    def left_after(self, grace_s: float) -> list[str]:
        """What still runs on any host after the grace; returns at once when there is nothing."""
        deadline = time.monotonic() + grace_s
        while left := [process for host in self.hosts for process in self.pids(host)]:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return self.running()
            psutil.wait_procs(left, timeout=min(remaining, 1))
        return []

    def listening(self, host: str) -> set[tuple[str, int]]:
        """The (address, port) pairs on which TCP connections to this host are accepted, IPv6 as in "::"."""
        return listening(self._pid(host))

    # ---- what can happen to a host

    def cut(self, host: str) -> ExitStack:
        """Pull the host's cables: what is sent is lost, nobody is told."""
        self._ip("".join(f"link set {port} down\n" for port in self._ports(host)))
        return _undo(self.restore, host)

    def restore(self, host: str) -> None:
        """Plug them in again."""
        self._ip("".join(f"link set {port} up\n" for port in self._ports(host)))

    def power_off(self, host: str) -> None:
        """Everything on the host is gone at once, and nobody is told."""
        pid = self._pid(host)
        # first the cables: connections of processes that are killed would be closed, which the others would hear
        self._ip("".join(f"link delete {port}\n" for port in self._ports(host)))
        handle = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGKILL)
            if not select.select([handle], [], [], 10)[0]:
                raise ClusterError(f"{host} does not end")
        finally:
            os.close(handle)
        self.hosts[host].pid = None

    def boot(self, *names: str) -> None:
        """Start hosts that are off, with what is on their disks (/etc, home); returns when their sshd listens."""
        for name in names:
            place = ["nsenter", "-t", str(self.room_pid), "--pid", "--net", "--mount", "--"]
            command = [*place, "setsid", *ROOM_PROGRAM, "host", str(self.folder), name]
            with (self.folder / name / "boot.log").open("ab") as log:
                subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
        with ExitStack() as stack:
            waiting = [self._plug_in(stack.enter_context(self.boot_socket.accept()[0])) for _ in names]
            for name, answers in waiting:
                if (answer := answers.recv(1000).decode()) != "ready":
                    log_text = (self.folder / name / "boot.log").read_text()
                    raise ClusterError(f"{name} did not start: {answer}\n{log_text}")
        for name in names:
            self._wait_for_port_22(name, open_=True)

    def sshd(self, host: str, action: str) -> ExitStack:
        """ "stop" it (connections are refused), let it "hang" (accepted, never answered), or "start" the real one."""
        for process in psutil.process_iter():
            if namespace(process.pid) == namespace(self._pid(host)) and serves_port_22(process):
                process.kill()
        self._wait_for_port_22(host, open_=False)
        if action == "hang":
            self._background(host, [sys.executable, "-I", "-S", "-c", HANGING_SSHD, "sshd-hang"])
        elif action == "start":
            self.run(host, sshd_command(self.folder / host)).check()
        if action != "stop":
            self._wait_for_port_22(host, open_=True)
        return _undo(self.sshd, host, "start")

    def bind(self, host: str, source: str | Path, target: str | Path) -> ExitStack:
        """Show `source` (a file or folder) on that host in the place of `target`, which must exist."""
        self.run(host, ["mount", "--bind", source, target]).check()
        return _undo(self.unmount, host, target)

    def tmpfs(self, host: str, folder: Path, *, size_bytes: int | None = None, read_only: bool = False) -> ExitStack:
        """Put an empty file system over a folder, on that host alone."""
        options = ",".join(filter(None, ["mode=755", f"size={size_bytes}" if size_bytes else "", "ro" * read_only]))
        self.run(host, ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]).check()
        return _undo(self.unmount, host, folder)

    def unmount(self, host: str, target: str | Path) -> None:
        self.run(host, ["umount", "--lazy", target]).check()

    def clock(self, host: str, skew_s: int) -> ExitStack:
        """Have every program started on that host from now on see a clock that is `skew_s` ahead."""
        return self.tricked(host, skew_s=skew_s)

    def tricked(self, host: str, **tricks: int) -> ExitStack:
        """Have every program started on that host from now on see what `cluster_disks.play` sets."""
        if not shutil.which("cc"):
            pytest.skip("a false clock or a slow disk needs a C compiler: cc is not installed")
        play(self.folder / host, **tricks)
        preload = self.etc(host) / "ld.so.preload"
        preload.write_text(f"{build_tricks(self.folder / host)}\n")
        return _undo(preload.unlink)

    def add_user(self, host: str, name: str, password: str) -> None:
        """A user who may log in by password; `run(..., user=name)` acts as that user."""
        self.run(host, ["useradd", "-m", "-d", self.home(host, name), "-s", "/bin/bash", name]).check()
        self.run(host, ["chpasswd", "-c", "SHA512"], stdin=f"{name}:{password}\n").check()

    def end_all(self) -> None:
        """Kill what runs on all hosts, sshd excepted."""
        for process in [process for host in self.hosts for process in self.pids(host)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    # ---- inside

    def _pid(self, host: str) -> int:
        pid = self.hosts[host].pid
        if pid is None:
            raise ClusterError(f"{host} is off")
        return pid

    def _ports(self, host: str) -> list[str]:
        return [f"{host}.{number}" for number in range(len(self.hosts[host].interfaces))]

    def _ip(self, lines: str) -> None:
        """Commands of `ip -batch`, at the switch."""
        command = ["nsenter", "-t", str(self.room_pid), "--net", "ip", "-batch", "-"]
        done = subprocess.run(command, input=lines, text=True, capture_output=True, check=False)
        if done.returncode != 0:
            raise ClusterError(f"{lines}{done.stderr}")

    def _plug_in(self, answers: socket.socket) -> tuple[str, socket.socket]:
        """Answer the call of a host that starts: give it its cables."""
        answers.settimeout(20)
        credentials = answers.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
        pid, name = struct.unpack("iII", credentials)[0], answers.recv(100).decode()
        host = self.hosts[name]
        host.pid = pid
        lines = ""
        for number, (port, (interface, _)) in enumerate(zip(self._ports(name), host.interfaces, strict=True)):
            # a host that starts again has the address that the others remember
            mac = f"02:00:0a:{77 + number:02x}:00:{list(self.hosts).index(name) + 11:02x}"
            lines += f"link add {port} type veth peer name {interface} address {mac} netns {pid}\n"
            lines += f"link set {port} master switch{number} up\n"
        self._ip(lines)
        answers.sendall(b"go")
        return name, answers

    def _background(self, host: str, argv: list[str]) -> None:
        self.popen(host, ["setsid", "--fork", *argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait(10)

    def _wait_for_port_22(self, host: str, *, open_: bool) -> None:
        deadline = time.monotonic() + 10
        while (22 in {port for _, port in self.listening(host)}) != open_:
            if time.monotonic() > deadline:
                raise ClusterError(f"{host}: sshd does not {'start' if open_ else 'end'}:\n{self.sshd_log(host)}")
            time.sleep(0.005)


@contextmanager
def cluster(
    count: int = 2,
    *,
    interfaces: Sequence[str | Sequence[str]] | None = None,
    networks: int = 1,
    shm_bytes: Sequence[int | None] | None = None,
) -> Iterator[Cluster]:
    """Start host1 ... hostN, on 10.77.0.11, 10.77.0.12, ... (further networks: 10.78.0.11, ...).

    Args:
        count: how many.
        interfaces: names of each host's network interfaces; eth0 (eth1 ...) by default.
        networks: how many switches; every host is plugged into each.
        shm_bytes: size of each host's /dev/shm; half the memory by default.
    """
    if reason := why_not():
        pytest.skip(reason)
    names = [(given,) if isinstance(given, str) else given for given in interfaces or []]
    names = names or [[f"eth{number}" for number in range(networks)]] * count
    hosts = {}
    for index, its in enumerate(names):
        places = [(name, f"10.{77 + number}.0.{11 + index}/24") for number, name in enumerate(its)]
        hosts[f"host{index + 1}"] = Host(f"host{index + 1}", places)
    folder = folder_for_disks(count)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        room_pid = stack.enter_context(_room(folder))
        boot_socket = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        boot_socket.bind(f"{folder}/boot")
        boot_socket.listen(count)
        boot_socket.settimeout(20)
        made = Cluster(folder, room_pid, hosts, boot_socket)
        furnish(folder, {name: host.interfaces for name, host in hosts.items()}, shm_bytes or [None] * count)
        try:
            made._ip("".join(f"link add switch{n} type bridge\nlink set switch{n} up\n" for n in range(networks)))
        except ClusterError as error:
            pytest.skip(f"hosts for tests are joined by a bridge, which this kernel does not have: {error}")
        made.boot(*hosts)
        yield made


def why_not() -> str:
    """Return why there can be no hosts here, "" if they can be made (as far as one sees without trying)."""
    if os.geteuid() != 0:
        return "hosts for tests are namespaces with sshd: they need root"
    missing = [package for name, package in NEEDED.items() if not program(name)]
    return f"hosts for tests need {' '.join(missing)}: apt-get install them" if missing else ""


@contextmanager
def _room(folder: Path) -> Iterator[int]:
    """The room; gives its process id, and ends it with everything in it."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*ROOM_PROGRAM, "room", str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            start_new_session=True, text=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                process.wait(10)
                errors.seek(0)
                said = (errors.read().strip().splitlines() or ["nothing said"])[-1]
                if "not permitted" in said or "denied" in said:
                    pytest.skip(f"hosts for tests are namespaces, which are not allowed here: {said}")
                raise ClusterError(f"no room for hosts: {said}")
            yield int(line)
        finally:
            process.stdin.close()
            process.stdout.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()  # the room's first process goes with it
                process.wait()


def _undo(function: Callable[..., object], *args: object) -> ExitStack:
    stack = ExitStack()
    stack.callback(function, *args)
    return stack
