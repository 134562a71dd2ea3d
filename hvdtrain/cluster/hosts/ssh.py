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
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from hvdtrain.cluster.hosts import probe
from hvdtrain.core.errors import ConfigError

ALIVE_INTERVAL_S, ALIVE_COUNT = 5, 3  # ssh itself ends a session whose other end says nothing for 15 s
_LOOK_UPS = 64  # of names at the same time

Kind = Literal[
    "unreachable", "refused", "unknown_name", "unknown_host_key", "changed_host_key", "denied", "timeout",
    "start_up_files", "no_python", "no_hvdtrain", "no_ssh", "other",
]  # fmt: skip


@dataclass(frozen=True)
class Ssh:
    """The options of ssh that reach hosts."""

    port: int | None = None  # of the hosts' sshd; None: as ssh is configured
    identity: str | None = None  # a private key's file; None: as ssh is configured
    connect_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        """Raises ConfigError if the key cannot be read: ssh would only warn, and use another one."""
        file = os.path.expanduser(self.identity) if self.identity is not None else os.devnull
        if os.path.isdir(file) or not os.access(file, os.R_OK):
            rule, received = "--identity must name a private key that can be read", repr(self.identity)
            raise ConfigError(rule, received, "ls -l ~/.ssh shows the keys of this user; ssh-keygen makes one")

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """Returns the command that runs `argv` on `host`, word for word: the remote shell gets it quoted."""
        # no questions, no forwarding, an end when the other side goes away
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": str(max(1, round(self.connect_timeout_s))),
            "ServerAliveInterval": str(ALIVE_INTERVAL_S),
            "ServerAliveCountMax": str(ALIVE_COUNT),
            # a user's configuration may waive the check
            "StrictHostKeyChecking": "yes",
            # reports the log-in, and errors where a user's configuration is quiet
            "LogLevel": "VERBOSE",
            # a user's configuration may forward ports and displays, which listen on the other side
            "ClearAllForwardings": "yes",
            "ForwardX11": "no",
            "ForwardAgent": "no",
            # a master that is there is used; this session must not become one, or ending it would end others
            "ControlMaster": "no",
        }
        words = ["ssh", "-T", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
        return [*words, *self.place("-p", "-i"), "--", host, shlex.join(argv)]

    def place(self, port: str, identity: str) -> list[str]:
        """Returns port and key, where they are not left to ssh's configuration, behind the flags for them."""
        words = [port, str(self.port)] if self.port is not None else []
        return words + ([identity, self.identity] if self.identity is not None else [])


@dataclass(frozen=True)
class SshProblem:
    """Why a host could not be reached."""

    kind: Kind
    what: str  # one sentence with the host's name
    fix: str  # what to type or change


def is_this_machine(name: str) -> bool:
    """Returns True if a host's name, or address, means this machine, and no other user ("user@") on it; needs no ssh.

    Raises ConfigError for another name than this machine's that leads to it by a loopback address.
    """
    user, _, host = name.rpartition("@")
    if user and user != getpass.getuser():
        return False
    own = socket.gethostname()
    if host.startswith("localhost") or host in {own, own.partition(".")[0], os.environ.get("SLURMD_NODENAME") or own}:
        return True
    try:
        address = ipaddress.IPv4Address(socket.gethostbyname(host))
    except (OSError, ValueError):
        return False
    if address.is_loopback and str(address) != host and host.partition(".")[0] != own.partition(".")[0]:
        rule = "the name of another host must lead there, and not back to this machine"
        received = f"{host} is {address} here ({own}): ranks meant for it would run on this machine"
        raise ConfigError(rule, received, f"correct /etc/hosts: getent hosts {host}; this machine itself is localhost")
    return address.is_loopback or any(its["address"] == str(address) for its in probe.interfaces() if its["up"])


def are_this_machine(names: Sequence[str]) -> dict[str, Future[bool]]:
    """Returns of each name what `is_this_machine` output, or raised: all at once, as a name server may be slow."""
    with ThreadPoolExecutor(min(len(names), _LOOK_UPS)) as pool:
        return {name: pool.submit(is_this_machine, name) for name in names}


def explain(
    host: str,
    returncode: int | None,
    output: str,
    ssh: Ssh | None = None,
    *,
    python: str = "",
    answered: bool = False,
) -> SshProblem:
    """Returns the problem behind a failed ssh command; pure.

    ssh's own messages count only if ssh itself failed (exit code 255): a shell's start-up files may also write to
    standard error.

    Args:
        host: the host that ssh called.
        returncode: the command's exit code; None: the caller ended it because it took too long.
        output: all output that came instead of an answer, standard error first.
        ssh: the options of the call, for the commands in the fix.
        python: the interpreter that should run there.
        answered: the command there had begun, and so the shell's start-up files had ended.
    """
    logged_in, output = "Authenticated to " in output, _NOTICE.sub("", output)
    port = f" -p {ssh.port}" if ssh is not None and ssh.port is not None else ""
    name = host.rpartition("@")[2]
    known = f"[{name}]:{ssh.port}" if port and ssh is not None else name
    for kind, pattern, what, fix in _SSH_PROBLEMS if returncode in (255, None) else _problems_there(returncode, python):
        if found := re.search(pattern, output, re.MULTILINE):
            line = next(line for line in output[found.start() :].splitlines() if line).strip()
            words = {"host": host, "name": name, "port": port, "known": known, "line": line, **found.groupdict()}
            return SshProblem(kind, what.format_map(words), fix.format_map(words))
    last = _last_line(output) or "no output"
    if returncode is None and logged_in and not answered:
        what = f"{host} accepted the log-in, but its shell did not start the command: {last}"
        return SshProblem("start_up_files", what, _START_UP_FILES.format(port=port, host=host))
    if returncode is None:
        what = f"{host} accepted the connection, then did not answer"
        return SshProblem("timeout", what, _HANGS.format(host=host, name=name))
    if returncode == 0:
        what = f"{host} did not run the command that it was given: {last}"
        fix = (
            f"ssh{port} {host} id must print the user's id;\nelse a start-up file there ends the shell (~/.bashrc),"
            " or authorized_keys restricts the key (command=),\nor the user has no shell"
        )
        return SshProblem("other", what, fix)
    fix = f"try: ssh{port} {host} true"
    if returncode != 255 and not answered:
        fix += "; if that also fails, a start-up file there ends the shell (~/.bashrc)"
    return SshProblem("other", f"ssh to {host} failed with exit code {returncode}: {last}", fix)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].strip()


def _problems_there(returncode: int | None, python: str) -> Iterator[_Problem]:
    """Yields the messages of a shell, or of Python, on a host where the command does not run."""
    named = rf"^.*{re.escape(python)}.*" if python else "^.*"
    yield (
        "denied", r"^This account is currently not available|^.*(nologin|not allowed to execute)",
        "{host} lets this user log in, but run no commands: {line}",
        "have its administrator give the account a shell (chsh -s /bin/bash), or use another user: -H user@{name}:N",
    )  # fmt: skip
    yield (
        "no_hvdtrain", r"^.*(No module named '?hvdtrain|Error while finding module specification for 'hvdtrain)",
        "the Python called on {host} has no hvdtrain: {line}",
        "install it there at the same path, or name the Python that has it: --python PATH",
    )  # fmt: skip
    yield (
        "no_python", r"^Unknown option: -P",
        "the Python called on {host} is older than 3.11", "name a newer one, with hvdtrain: --python PATH",
    )  # fmt: skip
    yield (
        "no_python", r"^this is Python (?P<version>\S+)",  # as the doctor's probe says it
        "the Python called on {host} is {version}: too old even for the probe (3.6)",
        "install this machine's Python there, or name another: --python PATH",
    )  # fmt: skip
    for code, pattern, what, fix in (
        (127, r"([Cc]ommand not found|[Nn]o such file or directory|not found)",
         "no such Python on {host}: {line}", "install it there at the same path"),
        (126, r"([Pp]ermission denied|cannot execute|Exec format error)",
         "the Python on {host} cannot be run: {line}", "chmod 755 it and its folders"),
    ):  # fmt: skip
        where = "^.*" if returncode == code else named
        yield "no_python", where + pattern, what, f"{fix}, or name another: --python PATH"


_Problem = tuple[Kind, str, str, str]
# what ssh writes at LogLevel=VERBOSE besides errors
_NOTICE = re.compile(r"^(Authenticated to|Transferred: sent|Bytes per second:) .*\n?", re.MULTILINE)
_START_UP_FILES = (
    "ssh{port} {host} true must end at once;\nstart-up files there (~/.bashrc, ~/.profile, /etc/profile.d) may wait,"
    " read the input,\nredirect the output or start another shell: begin ~/.bashrc with: [[ $- == *i* ]] || return"
)
_HANGS = (
    "log in there another way and look at its load, disks and sshd; the way there may lose large packets (MTU):"
    " ping -M do -s 1472 -c 3 {name}; or leave {host} out"
)
# kind, pattern of a line that OpenSSH 7 to 9 writes to standard error, what it means, what helps
_SSH_PROBLEMS: tuple[_Problem, ...] = (
    (
        "changed_host_key", r"^@ *WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED|^Host key for .* has changed",
        "{host}'s host key is not the one in known_hosts: it was set up again, or it is another machine",
        "ask its administrator for the key's fingerprint; if it was set up again: ssh-keygen -R {known}, then"
        " scripts/ssh_setup.sh {host}",
    ),
    (
        "unknown_host_key", r"^Host key verification failed|^No .* host key is known for",
        "{host}'s host key is not known here: ssh refuses it",
        "scripts/ssh_setup.sh {host} (it shows the fingerprint and asks), or once by hand: ssh{port} {host} true",
    ),
    (
        "denied",
        r"^(\S+: )?Permission denied \([\w,-]+\)|^sign_and_send_pubkey: no mutual signature"
        r"|^(Received disconnect|Disconnected) from .*Too many authentication failures",
        "{host} does not accept this user's key: {line}",
        "scripts/ssh_setup.sh {host}, or: ssh-copy-id{port} {host}; another key: --identity FILE\nssh asks for no"
        " passphrase here (ssh-add FILE), and uses no key that others can read (chmod 600 FILE)",
    ),
    (
        "unknown_name", r"^ssh: Could not resolve hostname",
        "the name {name} is not known here", "correct it, or add it to DNS or /etc/hosts: getent hosts {name}",
    ),
    (
        "refused", r"^ssh: connect to host \S+ port \d+: Connection refused",
        "{host} answers, but nothing listens on its ssh port: {line}",
        "start sshd there (systemctl start ssh), or give its port: --ssh-port N",
    ),
    (
        "timeout", r"^Connection timed out during banner exchange|^Timeout, server \S+ not responding",
        "{host} accepted the connection, then did not answer", _HANGS,
    ),
    (
        "unreachable", r"^ssh: connect to host \S+ port \d+: ",
        "{host} cannot be reached: {line}",
        "is it on, and its link up? ip route get {name}; ping -c 1 {name}; a firewall may drop the ssh port",
    ),
    (
        "unreachable",
        r"^(kex_exchange_identification|ssh_exchange_identification|banner exchange|client_loop|packet_write_wait): "
        r"|^Connection (closed|reset) by |^Connection to \S+ (port \d+ )?(closed|timed out)|^ssh_dispatch_run_fatal: ",
        "{host} ended the connection: {line}",
        "look at its sshd's log (journalctl -u ssh); many sessions at once: MaxStartups in sshd_config",
    ),
)  # fmt: skip


def not_started(error: OSError, host: str) -> SshProblem:
    """Returns why the command for a host could not even be started here."""
    if error.filename not in (None, "ssh"):  # this machine's own program
        what = f"{host} is this machine, and {error.filename} cannot be run here: {error.strerror}"
        return SshProblem("no_python", what, "name the Python that has hvdtrain: --python PATH")
    if isinstance(error, FileNotFoundError):
        return SshProblem("no_ssh", f"no ssh on this machine to reach {host}", "apt-get install openssh-client")
    return SshProblem("other", f"ssh to {host} failed: {error}", f"try: ssh {host}")
