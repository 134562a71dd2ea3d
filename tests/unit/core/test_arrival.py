"""Ranks that come at different times: the engine starts when all are there, and who does not come is named."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from hvdtrain.comm import arrival
from hvdtrain.core import variables
from hvdtrain.core.errors import ConfigError, LauncherError


class Memory:
    """A store for the threads of a test."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}
        self.questions = 0

    def set(self, key: str, value: str) -> None:
        self.held[key] = value

    def check(self, keys: list[str]) -> bool:
        self.questions += 1
        return all(key in self.held for key in keys)


def come(store: arrival.Store, ranks: list[int], size: int, seconds: float) -> list[BaseException | None]:
    """Has these ranks wait, a thread each; returns what each raised."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        waiting = [pool.submit(arrival.wait_for_all, store, rank, size, seconds) for rank in ranks]
    return [each.exception() for each in waiting]


@pytest.mark.parametrize("missing", [[1], [0], [0, 2]])
def test_who_does_not_come_is_named_by_all(missing: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    there = [rank for rank in range(4) if rank not in missing]
    for error in come(Memory(), there, 4, 0.2):
        assert isinstance(error, LauncherError) and variables.START_TIMEOUT_S in error.remedy
        named = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} did not arrive"
        assert named in error.received, error
        assert error.shared == (0 not in missing), "rank 0 speaks for all where it is there"


@pytest.mark.parametrize(("rank", "there", "speaks"), [(0, [], True), (1, [], True), (1, [0], False)])
def test_the_lowest_rank_that_is_there_tells_of_a_long_wait(
    rank: int, there: list[int], speaks: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arrival, "_FIRST_NOTE_S", 0.1)
    store = Memory()
    for other in there:
        store.set(arrival._here(other), "")
    with pytest.raises(LauncherError):
        arrival.wait_for_all(store, rank, 3, 0.3)
    missing = [other for other in range(3) if other not in (rank, *there)]
    said = capsys.readouterr().err
    assert (f"for ranks {', '.join(map(str, missing))} to start" in said) if speaks else not said, said


class Started:
    """An event that comes at the third look; time passes only while somebody waits for it."""

    def __init__(self) -> None:
        self.now_s, self.looks = 0.0, 0

    def wait(self, seconds: float) -> bool:
        self.now_s, self.looks = self.now_s + seconds, self.looks + 1
        return self.looks == 3


@pytest.mark.parametrize(("rank", "speaks"), [(0, True), (1, True), (2, False)])
def test_a_long_wait_for_mpi_is_told(
    rank: int, speaks: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = Started()
    monkeypatch.setattr(arrival, "time", SimpleNamespace(monotonic=lambda: started.now_s))
    arrival._watch_mpi(rank, 3, 600, started)  # type: ignore[arg-type]
    told = [line for line in capsys.readouterr().err.splitlines() if f"rank {rank} waits for " in line]
    assert [line.split("waits for ")[1].split(",")[0] for line in told] == (["30 s", "60 s"] if speaks else [])


@pytest.mark.parametrize("text", ["x", "0", "-1", "nan", "inf"])
def test_a_time_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="number of seconds"):
        arrival.timeout_s({variables.START_TIMEOUT_S: text})


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a rendezvous that fails at first."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    held: dict[str, bytes] = {}
    failures = iter([True, True])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200 if self.path in held else 404, held.get(self.path, b""))

        def do_PUT(self) -> None:
            held[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(200)

        def _answer(self, status: int, body: bytes = b"") -> None:
            if next(failures, False):
                self.connection.close()
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_rendezvous_that_fails_twice_is_asked_again(served: str) -> None:
    store = arrival.Rendezvous(served)
    assert not store.check(["here.1"])
    store.set("here.1", "")
    assert store.check(["here.1"])
