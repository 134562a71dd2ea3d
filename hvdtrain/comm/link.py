"""Messages beside the engine: JSON objects, a line each, over sockets and pipes.

So ranks report to rank 0 (`connect`), a rank and its host's agent, and the launcher and its agents.
"""

from __future__ import annotations

import contextlib
import json
import os
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
    """The addresses and port at which rank 0 listens, and its settings; it sends them to the others at the start."""

    after_s: float  # a rank is stuck that has been in one place so long; 0: ranks are not compared at all
    addresses: tuple[str, ...]
    port: int
    token: str  # who does not know it is turned away
    hang_s: float = 0.0  # a rank may let others wait so long; 0: for ever


def encode(message: Mapping[str, Any], mark: bytes = b"") -> bytes:
    """Returns a message as a line, which begins with `mark`."""
    return mark + json.dumps(message, separators=(",", ":")).encode() + b"\n"


WELCOME = encode({"welcome": True})


class Decoder:
    """Turns received bytes into messages, each of which begins with `mark`."""

    def __init__(self, mark: bytes = b"") -> None:
        self._mark = mark
        self.noise = b""  # the end of what came and was no message
        self.rest = b""  # of a line that is not complete

    def feed(self, data: bytes) -> list[Mapping[str, Any]]:
        """Returns the messages that are complete with `data`."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        messages: list[Mapping[str, Any]] = []
        for line in lines:
            noise, _, text = line.partition(self._mark) if self._mark else (b"", b"", line)
            try:
                messages.append({**json.loads(text)})  # an object
            except (ValueError, TypeError):
                noise = line
            if noise:
                self.noise = (self.noise + noise + b"\n")[-4096:]
        return messages


class Outbox:
    """Bytes for a descriptor that does not block: what the other end does not take now goes with the next `flush`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._unsent = descriptor, bytearray()

    def __len__(self) -> int:
        return len(self._unsent)

    def write(self, data: bytes) -> None:
        self._unsent += data

    def flush(self) -> bool:
        """Sends; returns False if the other end takes no more now. What is for one that is gone is discarded."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self._descriptor, self._unsent[: 1 << 16])]
        except BlockingIOError:
            return False
        except OSError:  # its end is seen by who reads
            self._unsent.clear()
        return True


class RankLink:
    """JSON objects, a line each, over a socket."""

    def __init__(self, connected: socket.socket, longest: int = _LONGEST_LINE) -> None:
        self.socket, self.longest = connected, longest
        self.socket.settimeout(_CONNECT_S)
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._decoder = Decoder()

    def send(self, **message: Any) -> None:
        self.socket.sendall(encode(message))

    def receive(self, wait_s: float) -> list[Mapping[str, Any]]:
        """Returns the messages so far; raises `OSError` when the other end is gone, or sends anything else."""
        if not self._poll.poll(1000 * wait_s):
            return []
        data = self.socket.recv(1 << 16)
        messages = self._decoder.feed(data)
        if not data or self._decoder.noise or len(self._decoder.rest) > self.longest:
            raise ConnectionError("the other end is gone, or sends no messages")
        return messages

    def close(self) -> None:
        self.socket.close()


def connect(meeting: Meeting, rank: int) -> RankLink | None:
    """Returns a link through the first of rank 0's addresses that answers as it does; None if none does in time.

    All are tried at once: some lead nowhere from this host, or to another program.
    """
    words = encode({"token": meeting.token, "rank": rank})
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
                        return RankLink(socket.socket(fileno=tried.detach()))
                    else:
                        selector.unregister(tried)
                except OSError:  # refused, or out of reach
                    selector.unregister(tried)
    return None
