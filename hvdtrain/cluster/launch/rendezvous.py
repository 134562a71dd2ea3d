"""Serves Horovod's rendezvous on one address, as a child of the first agent.

Horovod's own server listens on every address of the machine; this one only on the address the ranks use. It reads one
line of JSON from its standard input (the address and the ranks' places), answers with its port, and serves until its
standard input ends.
"""

from __future__ import annotations

import json
import socketserver
import sys
import threading
from collections.abc import Sequence
from typing import Any


def serve(address: str, places: Sequence[Any]) -> Any:
    """Returns Horovod's server, listening at `address` on a free port, not yet serving.

    Args:
        address: an IPv4 address of this machine.
        places: the arguments of Horovod's `SlotInfo`, a tuple a rank.
    """
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    class Server(RendezvousHTTPServer):
        daemon_threads = True

        def server_bind(self) -> None:
            # HTTPServer asks DNS for this address's name, which can take half a minute and is not needed
            socketserver.TCPServer.server_bind(self)
            self.server_name, self.server_port = self.server_address[:2]

    server = Server((address, 0), RendezvousHandler, False)
    server.init([SlotInfo(*place) for place in places])
    return server


def main() -> int:
    """Serves what standard input asks for; returns the exit code."""
    try:
        import horovod.runner.http.http_server  # noqa: F401 - while the launcher still waits for other hosts
    except ImportError as error:
        print(json.dumps({"error": f"no Horovod in {sys.executable}: {error}"}), flush=True)
        return 1
    asked = json.loads(sys.stdin.readline() or "null")
    if asked is None:
        return 0
    try:
        server = serve(asked["address"], asked["places"])
    except OSError as error:
        print(json.dumps({"error": f"cannot listen at {asked['address']}: {error}"}), flush=True)
        return 1
    print(json.dumps({"port": server.server_port}), flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
