"""What /proc tells about the hosts of `cluster_hosts`, seen from outside."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil


def namespace(pid: int) -> int | None:
    with contextlib.suppress(OSError):  # gone meanwhile
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    return None


def is_zombie_or_sshd(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("sshd") or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def serves_port_22(process: psutil.Process) -> bool:
    try:
        return process.name() == "sshd" or process.cmdline()[-1:] == ["sshd-hang"]
    except psutil.NoSuchProcess:
        return False


def command_of(process: psutil.Process, *, whole: bool = False) -> str:
    try:
        return " ".join(process.cmdline())[: None if whole else 200]
    except psutil.NoSuchProcess:
        return "(just ended)"


def _address(family: int, hexadecimal: str) -> str:
    """An address as /proc/net/tcp has it: 32-bit words, each in the machine's order of bytes."""
    words = [int(hexadecimal[start : start + 8], 16) for start in range(0, len(hexadecimal), 8)]
    return socket.inet_ntop(family, b"".join(word.to_bytes(4, sys.byteorder) for word in words))


def listening(pid: int) -> set[tuple[str, int]]:
    """The (address, port) pairs on which the network of a process accepts TCP connections."""
    return {local for local, _, state in _sockets(pid) if state == "0A"}


def connected(pid: int) -> set[tuple[tuple[str, int], tuple[str, int]]]:
    """The TCP connections in the network of a process: (address, port) of this end and of the other."""
    return {(local, remote) for local, remote, state in _sockets(pid) if state == "01"}


def _sockets(pid: int) -> Iterator[tuple[tuple[str, int], tuple[str, int], str]]:
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            local, remote, state = line.split()[1:4]
            yield _place(family, local), _place(family, remote), state


def _place(family: int, text: str) -> tuple[str, int]:
    address, port = text.split(":")
    return _address(family, address), int(port, 16)
