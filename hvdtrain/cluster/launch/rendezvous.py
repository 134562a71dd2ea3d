"""Serves Horovod's rendezvous on one address, as a child of the first agent.

Horovod's own server listens on every address of the machine; this one only on the address the ranks use. It reads
lines of JSON from its standard input, each an address and the ranks' places there, answers each with a port, and serves
there until the next line, or the end of its standard input. Without places nothing is served.
"""

from __future__ import annotations

import socketserver
import sys
import threading
from collections.abc import Sequence
from itertools import chain
from typing import Any

from hvdtrain.comm.link import Decoder, encode

HOLD_S = 0.5


def serve(address: str, places: Sequence[Any]) -> Any:
    """Returns Horovod's server, listening at `address` on a free port, not yet serving.

    Args:
        address: an IPv4 address of this machine.
        places: the arguments of Horovod's `SlotInfo`, a tuple a rank.
    """
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    class Handler(RendezvousHandler):
        """Holds a request for a missing value for a while, because each rank's Horovod would repeat it every 10 ms."""

        def _get_value(self, scope: str, key: str) -> Any:
            its = self.server
            with its.changed:
                its.changed.wait_for(lambda: its.closed or key in its.cache.get(scope, {}), HOLD_S)
                return its.cache.get(scope, {}).get(key)

        def _put_value(self, scope: str, key: str, value: bytes) -> None:
            super()._put_value(scope, key, value)
            with self.server.changed:
                self.server.changed.notify_all()

    class Server(RendezvousHTTPServer):
        daemon_threads = True
        request_queue_size = 1024  # ranks come all at once
        closed = False
        changed: threading.Condition | None = None

        def server_close(self) -> None:
            super().server_close()
            if self.changed is not None:  # it has listened
                with self.changed:
                    self.closed = True
                    self.changed.notify_all()

        def server_bind(self) -> None:
            # HTTPServer asks DNS for this address's name, which can take half a minute and is not needed
            socketserver.TCPServer.server_bind(self)
            self.server_name, self.server_port = self.server_address[:2]

    server = Server((address, 0), Handler, False)
    server.changed = threading.Condition(server.cache_lock)
    server.init([SlotInfo(*place) for place in places])
    return server


def main() -> int:
    """Serves what standard input asks for; returns the exit code."""
    try:
        import horovod.runner.http.http_server  # noqa: F401 - while the launcher still waits for other hosts
    except ImportError as error:
        _answer(error=f"no Horovod in {sys.executable}: {error}")
        return 1
    server: Any = None
    for asked in chain.from_iterable(map(Decoder().feed, sys.stdin.buffer)):
        last, server = server, None
        if asked["places"] is not None:
            try:
                server = serve(asked["address"], asked["places"])
            except OSError as error:
                _answer(error=f"cannot listen at {asked['address']}: {error}")
            else:
                threading.Thread(target=server.serve_forever, daemon=True).start()
                _answer(port=server.server_port, serial=asked["serial"])
        if last is not None:
            last.server_close()  # who comes now is refused
            threading.Thread(target=last.shutdown, daemon=True).start()  # which waits for a while
    return 0


def _answer(**message: Any) -> None:
    sys.stdout.buffer.write(encode(message))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
