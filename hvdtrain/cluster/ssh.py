"""Reaching a host: the ssh command, and what its failure means in words a user can act on.

Host keys are never waved through: ssh's own known_hosts decide, and where ssh would ask, it must refuse (BatchMode).
"""

from __future__ import annotations

import getpass
import ipaddress
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hvdtrain.cluster.addresses import interfaces

ALIVE_INTERVAL_S, ALIVE_COUNT = 5, 3  # ssh itself ends a session whose other end says nothing for 15 s

Kind = Literal[
    "unreachable", "refused", "unknown_name", "unknown_host_key", "changed_host_key", "denied", "timeout",
    "no_python", "no_hvdtrain", "no_ssh", "other",
]  # fmt: skip


@dataclass(frozen=True)
class Ssh:
    """How hosts are reached.

    Attributes:
        port: of their sshd; None: what ssh's own configuration says.
        identity: a private key's file; None: what ssh's own configuration says.
        connect_timeout_s: until a host that does not answer is given up.
    """

    port: int | None = None
    identity: str | None = None
    connect_timeout_s: float = 5.0

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` on `host`, word for word: the remote shell gets it quoted."""
        return [*self.words(), "--", host, shlex.join(argv)]

    def words(self) -> list[str]:
        """Return ssh and its options: no questions, no forwarding, an end when the other side goes away."""
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": str(max(1, round(self.connect_timeout_s))),
            "ServerAliveInterval": str(ALIVE_INTERVAL_S),
            "ServerAliveCountMax": str(ALIVE_COUNT),
            # a user's configuration may forward ports and displays, which listen on the other side
            "ClearAllForwardings": "yes",
            "ForwardX11": "no",
            "ForwardAgent": "no",
            # a master that is there is used; this session must not become one, or ending it would end others
            "ControlMaster": "no",
        }
        words = ["ssh", "-T", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
        words += ["-p", str(self.port)] if self.port is not None else []
        return words + (["-i", self.identity] if self.identity is not None else [])


@dataclass(frozen=True)
class SshProblem:
    """Why a host could not be reached.

    Attributes:
        kind: for programs.
        what: one sentence with the host's name.
        fix: what to type or change.
    """

    kind: Kind
    what: str
    fix: str


def is_this_machine(name: str) -> bool:
    """Return whether a host's name, or address, means the machine this runs on; needs no ssh.

    "user@" makes it another machine unless it is the user that this runs as: that user's ranks are started by ssh.
    """
    user, _, host = name.rpartition("@")
    if user and user != getpass.getuser():
        return False
    own = socket.gethostname()
    if host in {"localhost", own, own.partition(".")[0], os.environ.get("SLURMD_NODENAME") or own}:
        return True
    try:
        address = ipaddress.IPv4Address(socket.gethostbyname(host))
    except (OSError, ValueError):
        return False
    return address.is_loopback or any(found.ip == address for its in interfaces().values() for found in its)


def explain(host: str, returncode: int | None, stderr: str, ssh: Ssh | None = None) -> SshProblem:
    """Return what a failed ssh command means; pure.

    Args:
        host: that was called.
        returncode: of the command; None: it was ended because it took too long.
        stderr: all it wrote there.
        ssh: how it was called, for the commands in the fix.
    """
    port = f" -p {ssh.port}" if ssh is not None and ssh.port is not None else ""
    said = stderr.strip()
    name = host.rpartition("@")[2]
    known = f"[{name}]:{ssh.port}" if port and ssh is not None else name
    for kind, pattern, what, fix in _PROBLEMS:
        if re.search(pattern, said):
            words = {"host": host, "name": name, "port": port, "known": known, "last": _last_line(said)}
            return SshProblem(kind, what.format_map(words), fix.format_map(words))
    if returncode is None:
        return SshProblem("timeout", f"{host} accepted the connection, then did not answer", _HANGS.format(host=host))
    last = _last_line(said) or "nothing on standard error"
    return SshProblem("other", f"ssh to {host} failed with exit code {returncode}: {last}", f"try: ssh{port} {host}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


_HANGS = "log in there another way and look at its load, disks and sshd; or leave {host} out"
# kind, pattern in what OpenSSH 7 to 9, a shell or Python write to standard error, what it means, what helps
_PROBLEMS: tuple[tuple[Kind, str, str, str], ...] = (
    (
        "changed_host_key", r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key for .* has changed",
        "{host}'s host key is not the one in known_hosts: it was set up anew, or it is another machine",
        "ask its administrator for the key's fingerprint; if it was set up anew: ssh-keygen -R {known}, then"
        " scripts/ssh_setup.sh {host}",
    ),
    (
        "unknown_host_key", r"Host key verification failed|No .* host key is known for",
        "{host}'s host key is not known here: ssh refuses it",
        "scripts/ssh_setup.sh {host} (it shows the fingerprint and asks), or once by hand: ssh{port} {host} true",
    ),
    (
        "denied", r"Permission denied|Too many authentication failures|no mutual signature",
        "{host} does not accept this user's key: {last}",
        "scripts/ssh_setup.sh {host}, or: ssh-copy-id{port} {host}; another key: --identity FILE",
    ),
    (
        "unknown_name", r"Could not resolve hostname|Name or service not known",
        "the name {name} is not known here", "correct it, or add it to DNS or /etc/hosts: getent hosts {name}",
    ),
    (
        "refused", r"Connection refused",
        "{host} answers, but nothing listens on its ssh port: {last}",
        "start sshd there (systemctl start ssh), or give its port: --ssh-port N",
    ),
    (
        "timeout", r"timed out during banner exchange|Timeout, server .* not responding",
        "{host} accepted the connection, then did not answer", _HANGS,
    ),
    (
        "unreachable", r"No route to host|Network is unreachable|Connection timed out|Operation timed out",
        "{host} cannot be reached: {last}",
        "is it on, and its link up? ip route get {name}; ping -c 1 {name}; a firewall may drop the ssh port",
    ),
    (
        "unreachable", r"Connection (closed|reset)|kex_exchange_identification|Broken pipe|closed by remote host",
        "{host} ended the connection: {last}",
        "look at its sshd's log (journalctl -u ssh); many sessions at once: MaxStartups in sshd_config",
    ),
    (
        "no_hvdtrain", r"No module named '?hvdtrain|Error while finding module specification for 'hvdtrain",
        "the Python called on {host} has no hvdtrain: {last}",
        "install it there at the same path, or name the Python that has it: --python PATH",
    ),
    (
        "no_python", r"Unknown option: -P",
        "the Python called on {host} is older than 3.11", "name a newer one, with hvdtrain: --python PATH",
    ),
    (
        "no_python", r"(?i)(command not found|no such file or directory|not found|cannot execute|permission denied)",
        "no such Python on {host}: {last}", "install it there at the same path, or name another: --python PATH",
    ),
)  # fmt: skip


def problem_of(error: Exception, host: str, ssh: Ssh | None = None) -> SshProblem:
    """Return the problem behind an exception of `subprocess` that calls ssh."""
    if isinstance(error, subprocess.TimeoutExpired):
        said = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else (error.stderr or "")
        return explain(host, None, said, ssh)
    if isinstance(error, OSError) and error.filename not in (None, "ssh"):  # this machine's own agent
        what = f"{host} is this machine, and {error.filename} cannot be run here: {error.strerror}"
        return SshProblem("no_python", what, "name the Python that has hvdtrain: --python PATH")
    if isinstance(error, FileNotFoundError):
        return SshProblem("no_ssh", f"no ssh on this machine to reach {host}", "apt-get install openssh-client")
    return SshProblem("other", f"ssh to {host} failed: {error}", f"try: ssh {host}")
