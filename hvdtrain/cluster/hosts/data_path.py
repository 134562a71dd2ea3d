"""Finds out whether a host reaches the first one over the network that ranks talk through, which ssh may not use.

When only that network is cut, ranks wait for each other until Gloo gives up, and blame each other. A connection to the
rendezvous on the first host, which listens there anyway, shows a cut sooner and by name.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
from collections.abc import Sequence

EVERY_S = 2.0
GIVEN_UP_S = 4.0  # a connection that is not made; SYN has been sent three times by then
_ARRIVED = (0, errno.ECONNREFUSED)  # refused is an answer as well


class DataPath:
    """Connects to `peer` (address and port) again and again, without ever waiting; `own`: this host's address."""

    def __init__(self, own: str, peer: Sequence[object]) -> None:
        self._own, self.peer = own, (str(peer[0]), int(str(peer[1])))
        self._began_s = float("-inf")
        self._failing_s = float("inf")  # since when: the first that has had no answer began
        self._socket: socket.socket | None = None

    def unreached_s(self, now_s: float) -> float:
        """Returns for how long no connection could be made, since the first try; call it a few times a second.

        Time before the first try does not count: where the first host loses power, the others would seem cut off.
        """
        if self._socket is not None:
            self._look(self._socket, now_s)
        if self._socket is None and now_s - self._began_s >= EVERY_S:
            self._began_s = now_s
            self._connect(now_s)
        return max(0.0, now_s - self._failing_s)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self, now_s: float) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):  # the address may be gone with the link; then the connection fails, too
            self._socket.bind((self._own, 0))
        code = self._socket.connect_ex(self.peer)
        self._failing_s = min(self._failing_s, now_s)
        if code in _ARRIVED:
            self._failing_s = float("inf")
        if code != errno.EINPROGRESS:
            self.close()

    def _look(self, made: socket.socket, now_s: float) -> None:
        if select.select([], [made], [], 0)[1]:
            if made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ARRIVED:
                self._failing_s = float("inf")
            self.close()
        elif now_s - self._began_s >= GIVEN_UP_S:
            self.close()
