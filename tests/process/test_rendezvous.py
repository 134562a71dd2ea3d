"""Horovod's rendezvous as hvdtrain serves it: who asks too early is answered when the answer is there."""

from __future__ import annotations

import http.client
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hvdtrain.cluster.launch import rendezvous

PLACES = [("host", 0, 0, 0, 1, 1, 1)]
LONG_S = 60.0


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(rendezvous, "HOLD_S", LONG_S)
    its = rendezvous.serve("127.0.0.1", PLACES)
    thread = threading.Thread(target=its.serve_forever, daemon=True)
    thread.start()
    yield its
    its.server_close()
    its.shutdown()
    thread.join()
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:  # its server's part, no engine
        del sys.modules[name]


def ask(server: Any, method: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
    line = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=2 * LONG_S)
    line.request(method, f"/global/{key}", body)
    answer = line.getresponse()
    found = answer.status, answer.read()
    line.close()
    return found


def asking(server: Any, key: str) -> tuple[threading.Thread, list[tuple[int, bytes]]]:
    """Somebody who has asked, and waits."""
    found: list[tuple[int, bytes]] = []
    waits, wait_for = threading.Event(), server.changed.wait_for

    def waiting(*args: Any) -> Any:
        waits.set()  # by who has the lock, which a PUT takes: it comes when this one waits
        return wait_for(*args)

    server.changed.wait_for = waiting
    thread = threading.Thread(target=lambda: found.append(ask(server, "GET", key)))
    thread.start()
    assert waits.wait(LONG_S)
    server.changed.wait_for = wait_for
    return thread, found


def test_an_answer_comes_when_it_is_there(server: Any) -> None:
    thread, found = asking(server, "1")
    assert ask(server, "PUT", "0", b"another")[0] == 200
    assert ask(server, "GET", "0") == (200, b"another") and not found
    assert ask(server, "PUT", "1", b"the address")[0] == 200
    thread.join(LONG_S / 2)
    assert found == [(200, b"the address")]


def test_who_waits_at_the_end_is_let_go(server: Any) -> None:
    thread, found = asking(server, "1")
    server.server_close()
    thread.join(LONG_S / 2)
    assert found == [(404, b"")]


def test_nobody_waits_for_ever(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "HOLD_S", 0.1)
    assert ask(server, "GET", "1") == (404, b"")
