"""Measurements of a host's links to other hosts, and the loop that answers requests. Sent after `probe`, as text: only
the standard library, only ASCII, Python 3.6.

It opens ports only on the requested address, never on all of them. They answer only to peers with the job's token.
"""

import errno
import hmac
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

LIFE_S = 120.0  # then this process ends itself, whatever became of the one that started it
CHUNK_BYTES = 1 << 18
ECHOES = 30
SOCKET_LIMIT_S = 10.0
MARKER = ".hvdtrain-doctor-%s-%d"
MARKER_BYTES = 1 << 20

_token = b""
_markers: "list[str]" = []


def listen(request: "dict[str, Any]") -> "dict[str, Any]":
    """Opens a port on an address: {"port": number} or {"text": why not}."""
    global _token
    _token = request["token"].encode()
    try:
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        server.bind((request["address"], 0))
        server.listen(256)
    except OSError as error:
        return {"text": str(error)}
    threading.Thread(target=_accept, args=(server,), daemon=True).start()
    return {"port": server.getsockname()[1]}


def _accept(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    """Serves one connection: the token, then E (send the bytes back) or S (count the bytes)."""
    try:
        connection.settimeout(SOCKET_LIMIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not hmac.compare_digest(_exactly(connection, len(_token)), _token):
            return
        if _exactly(connection, 1) == b"E":
            while True:
                connection.sendall(_exactly(connection, 1))
        _count(connection)
    except OSError:
        return  # the other host closed the connection: it reports the error
    finally:
        connection.close()


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise OSError("closed by the other side")
        data += piece
    return data


def _count(connection: socket.socket) -> None:
    """Receives until the sender has sent all, and sends it the number of bytes and seconds."""
    buffer, total, start = bytearray(CHUNK_BYTES), 0, None
    while True:
        count = connection.recv_into(buffer)
        start = start or time.monotonic()
        total += count
        if not count:
            break
    seconds = time.monotonic() - (start or 0)
    connection.sendall(json.dumps({"bytes": total, "seconds": seconds}).encode())


def reach(request: "dict[str, Any]") -> "dict[str, Any]":
    """Connects to every peer at once: {"reach": {name: {"seconds", "source"} or {"error", "text"}}}."""
    found: dict[str, Any] = {}

    def visit(name: str, address: str, port: int) -> None:
        found[name] = _visit(address, port, request["token"].encode(), request["timeout_s"])

    threads = [threading.Thread(target=visit, args=peer, daemon=True) for peer in request["peers"]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(request["timeout_s"] * 2 + 1)
    missing = {"error": "timeout", "text": "no answer in {:g} s".format(request["timeout_s"])}
    return {"reach": {peer[0]: found.get(peer[0], missing) for peer in request["peers"]}}


def _visit(address: str, port: int, token: bytes, timeout_s: float) -> "dict[str, Any]":
    """Connects, and measures the shortest time of a byte there and back."""
    connected = False
    try:
        with socket.create_connection((address, port), timeout_s) as connection:
            connected = True
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(token + b"E")
            times = []
            for _ in range(ECHOES):
                start = time.perf_counter()
                connection.sendall(b".")
                _exactly(connection, 1)
                times.append(time.perf_counter() - start)
            return {"seconds": min(times), "source": connection.getsockname()[0]}
    except OSError as error:
        return {"error": _kind(error, connected), "text": str(error)}


def _kind(error: OSError, connected: bool) -> str:
    if isinstance(error, socket.timeout):
        return "silent" if connected else "timeout"
    if connected:
        return "other"
    kinds = {  # 0: an error without a number
        0: "other", errno.ECONNREFUSED: "refused", errno.EHOSTUNREACH: "no route", errno.ENETUNREACH: "no route",
        errno.EACCES: "forbidden", errno.EPERM: "forbidden", errno.ETIMEDOUT: "timeout", errno.EINVAL: "no route",
    }  # fmt: skip
    return kinds.get(error.errno or 0, "other")


def send(request: "dict[str, Any]") -> "dict[str, Any]":
    """Sends to one peer for a while: {"bytes", "seconds"} as the receiver counted, or {"error", "text"}."""
    address, port = request["peer"]
    chunk = memoryview(bytearray(CHUNK_BYTES))
    try:
        with socket.create_connection((address, port), request["timeout_s"]) as connection:
            connection.sendall(request["token"].encode() + b"S")
            connection.settimeout(request["timeout_s"])
            end = time.monotonic() + request["seconds"]
            while time.monotonic() < end:
                connection.sendall(chunk)
            connection.shutdown(socket.SHUT_WR)
            data = b""
            while True:
                piece = connection.recv(4096)
                if not piece:
                    return json.loads(data.decode())
                data += piece
    except socket.timeout:  # noqa: UP041 - they became one in Python 3.10
        return {"error": "silent", "text": "nothing went through for {:g} s".format(request["timeout_s"])}
    except (OSError, ValueError) as error:
        return {"error": "other", "text": str(error)}


def mark(request: "dict[str, Any]") -> "dict[str, Any]":
    """Writes this host's file into a folder, to the disk: {} or {"error": text, "errno": number}."""
    path = os.path.join(request["folder"], MARKER % (request["token"], request["index"]))
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        _markers.append(path)
        try:
            view = memoryview(b"\0" * MARKER_BYTES)
            while view:  # a disk that is nearly full takes a part, and refuses the next
                view = view[os.write(handle, view) :]
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        return {"error": error.strerror, "errno": errno.errorcode.get(error.errno or 0, "")}
    return {}


def see(request: "dict[str, Any]") -> "dict[str, Any]":
    """Returns the hosts whose marker files are visible in a folder on this host: {"seen": [index]}."""
    paths = [os.path.join(request["folder"], MARKER % (request["token"], index)) for index in range(request["count"])]
    return {"seen": [index for index, path in enumerate(paths) if os.path.exists(path)]}


def unmark(request: "dict[str, Any]") -> "dict[str, Any]":
    """Removes what `mark` wrote."""
    while _markers:
        try:
            os.unlink(_markers.pop())
        except FileNotFoundError:
            continue
    return {}


def serve(answers: "dict[str, Callable[[dict[str, Any]], Any]]", prefix: str) -> None:
    """Answers requests (one line of JSON each) until standard input ends; then removes its files and exits. Each reply
    begins with the prefix, as in `protocol`, because a shell's start-up files may print before it."""
    end = threading.Timer(LIFE_S, os._exit, [3])
    end.daemon = True
    end.start()
    answers = dict(answers, listen=listen, reach=reach, send=send, mark=mark, see=see, unmark=unmark)
    try:
        for line in iter(sys.stdin.readline, ""):
            request = json.loads(line)
            try:
                reply = answers[request["do"]](request)
            except Exception as error:  # the reply reports it; the next request may still be answered
                reply = {"error": "failed", "text": f"{type(error).__name__}: {error}"}
            sys.stdout.write(prefix + json.dumps(reply) + "\n")
            sys.stdout.flush()
    finally:
        unmark({})
        os._exit(0)  # threads may wait for a dead disk or driver
