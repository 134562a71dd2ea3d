"""What ranks say to one another beside the engine: JSON objects, a line each, over a socket of rank 0's."""

from __future__ import annotations

import contextlib
import json
import select
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CONNECT_S = 2.0
_TICK_S = 0.25
_LONGEST_LINE = 1 << 14  # of one who has not said who it is
LONGEST_REPORT = 1 << 22


@dataclass(frozen=True)
class Meeting:
    """Where rank 0 listens: what it tells the others when they meet.

    Attributes:
        after_s: a rank is stuck that has been in one place so long; 0: ranks are not compared at all.
        addresses, port: of the socket.
        token: who does not know it is turned away.
        hang_s: a rank may let others wait so long; 0: for ever.
    """

    after_s: float
    addresses: tuple[str, ...]
    port: int
    token: str
    hang_s: float = 0.0


def _line(**message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


WELCOME = _line(welcome=True)


class Link:
    """JSON objects, a line each, over a socket."""

    def __init__(self, connected: socket.socket, longest: int = _LONGEST_LINE) -> None:
        self.socket, self.longest = connected, longest
        self.socket.settimeout(_CONNECT_S)
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._rest = b""

    def send(self, **message: Any) -> None:
        self.socket.sendall(_line(**message))

    def receive(self, wait_s: float) -> list[Mapping[str, Any]]:
        """Returns the messages so far; raises `OSError` or `ValueError` when the other end is gone, or no rank."""
        if not self._poll.poll(1000 * wait_s):
            return []
        data = self.socket.recv(1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data or len(self._rest) > self.longest:
            raise ConnectionError("the other end is gone")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self.socket.close()


def connect(meeting: Meeting, rank: int) -> Link | None:
    """Returns a link through the first of rank 0's addresses that answers as it does; None if none does in time.

    All are tried at once: some lead nowhere from this host, or to another program.
    """
    words = _line(token=meeting.token, rank=rank)
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for address in meeting.addresses:
            tried = stack.enter_context(socket.socket())
            tried.setblocking(False)
            with contextlib.suppress(OSError):  # a name that does not resolve
                tried.connect_ex((address, meeting.port))
                selector.register(tried, selectors.EVENT_WRITE)
        deadline = time.monotonic() + _CONNECT_S
        while selector.get_map() and time.monotonic() < deadline:
            for key, event in selector.select(_TICK_S):
                assert isinstance(key.fileobj, socket.socket)
                tried = key.fileobj
                try:
                    if event & selectors.EVENT_WRITE:
                        tried.sendall(words)
                        selector.modify(tried, selectors.EVENT_READ)
                    elif tried.recv(len(WELCOME)) == WELCOME:
                        return Link(socket.socket(fileno=tried.detach()))
                    else:
                        selector.unregister(tried)
                except OSError:  # refused, or out of reach
                    selector.unregister(tried)
    return None
