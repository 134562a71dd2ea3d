"""What runs in and around the hosts of `cluster_hosts`, in one file without imports of ours.

    room FOLDER               holds the hosts: a network (the switch) and process ids of its own; ends with its input
    host FOLDER NAME          a host's first process: sets its host up, then waits, and reaps what lost its parent
    enter PID CWD COMMAND...  runs a command in the host whose first process is PID

Everything lives in the room's process id namespace, and the room's first process ends when the pipe from the test
process is closed, however that came about. The kernel then ends whatever is left in the room.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

NAMESPACES = {"ipc": 0x08000000, "uts": 0x04000000, "net": 0x40000000, "pid": 0x20000000, "mnt": 0x00020000}
MS_NOSUID_NODEV_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 0x2 | 0x4 | 0x8, 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG = 1
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

libc = ctypes.CDLL(None, use_errno=True)


def checked(what: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(*names: str) -> None:
    checked(f"unshare {' '.join(names)}", libc.unshare(sum(NAMESPACES[name] for name in names)))


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    checked(f"mount {kind or source} on {target}", libc.mount(*arguments))


def end_with_parent() -> None:
    checked("prctl", libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def room(folder: str) -> None:
    """Tells the room's process id on standard output when it is ready; removes the folder when it has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    unshare("net", "mnt", "pid")
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    ready, done = os.pipe()
    first = os.fork()
    if first == 0:
        end_with_parent()
        mount("proc", "/proc", "proc", MS_NOSUID_NODEV_NOEXEC)
        os.write(done, b"1")
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever loses its parent is reaped by the kernel
        sys.stdin.read()
        os._exit(0)
    os.close(done)
    if os.read(ready, 1):
        print(first, flush=True)
    os.waitpid(first, 0)  # returns when every process of the room is gone
    shutil.rmtree(folder, ignore_errors=True)


def host(folder: str, name: str) -> None:
    """Talks with the test process over `folder`/boot: its name; (cable plugged in) "go"; "ready", or what failed."""
    unshare("ipc", "uts", "net", "mnt", "pid")
    if os.fork() != 0:
        os._exit(0)
    settings = json.loads(Path(folder, name, "settings.json").read_text())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as boot:
        boot.connect(f"{folder}/boot")
        boot.sendall(name.encode())
        try:
            set_up(folder, name, settings, boot)
            answer = "ready"
        except (OSError, subprocess.CalledProcessError) as error:
            answer = f"{name}: {error}"
        boot.sendall(answer.encode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        signal.pause()


def set_up(folder: str, name: str, settings: dict[str, Any], boot: socket.socket) -> None:
    socket.sethostname(name)
    mount("proc", "/proc", "proc", MS_NOSUID_NODEV_NOEXEC)
    mount("sysfs", "/sys", "sysfs", MS_NOSUID_NODEV_NOEXEC)
    disks = os.open(folder, os.O_PATH)  # they may lie in the /dev/shm that now disappears from sight
    size = f",size={settings['shm_bytes']}" if settings["shm_bytes"] else ""
    mount("tmpfs", "/dev/shm", "tmpfs", options="mode=1777" + size)
    os.makedirs(folder, exist_ok=True)
    mount(f"/proc/self/fd/{disks}", folder, flags=MS_BIND)
    os.close(disks)
    mount(f"{folder}/{name}/etc", "/etc", flags=MS_BIND)
    mount(f"{folder}/{name}/home", f"{folder}/home", flags=MS_BIND)
    mount("tmpfs", "/run", "tmpfs", options="mode=755")
    os.mkdir("/run/sshd", 0o755)
    assert boot.recv(2) == b"go"
    lines = ["link set lo up"]
    for interface, address in settings["interfaces"]:
        lines += [f"address add {address} dev {interface}", f"link set {interface} up"]
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)
    subprocess.run(settings["sshd"], check=True)


def enter(pid: str, folder: str, *command: str) -> None:
    """Runs `command`, hands signals on to it (SIGINT to its whole group, as a terminal does), and ends as it ends."""
    places = {name: os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in NAMESPACES}
    for name, place in places.items():
        checked(f"setns {name}", libc.setns(place, NAMESPACES[name]))
    waited_for = {*FORWARDED, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        end_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, waited_for)
        try:
            os.chdir(folder)
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
        os._exit(127)
    with contextlib.suppress(PermissionError, ProcessLookupError):  # it was faster, and runs its command, or is gone
        os.setpgid(child, child)
    while True:
        number = signal.sigwait(waited_for)
        if number == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                end_as(status)
        else:
            (os.killpg if number == signal.SIGINT else os.kill)(child, number)


def end_as(status: int) -> NoReturn:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    parts: dict[str, Callable[..., None]] = {"room": room, "host": host, "enter": enter}
    parts[sys.argv[1]](*sys.argv[2:])
