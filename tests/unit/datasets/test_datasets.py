"""MNIST from every source, the embedded digits, and what is refused."""

from __future__ import annotations

import hashlib
import importlib.util
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.core import variables
from hvdtrain.core.errors import ConfigError, ReplicaError
from hvdtrain.datasets import digits, load_mnist, mnist
from hvdtrain.datasets import download as download_module
from hvdtrain.datasets.download import download
from hvdtrain.datasets.images import Images
from hvdtrain.world.world import World


@pytest.fixture(autouse=True)
def keras_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Keras cache of the test's own."""
    home = tmp_path / "keras home"
    monkeypatch.setenv("KERAS_HOME", str(home))
    monkeypatch.delenv(variables.MNIST_URL, raising=False)
    return home


def small(train: int = 7, test: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.integers(0, 256, (train, 28, 28), np.uint8),
        "y_train": rng.integers(0, 10, train, np.uint8),
        "x_test": rng.integers(0, 256, (test, 28, 28), np.uint8),
        "y_test": rng.integers(0, 10, test, np.uint8),
    }


def write_npz(path: Path, **changes: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **{**small(), **changes})
    return path


def same(images: Images, expected: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(getattr(images, name), expected[name]) for name in mnist.ARRAYS)


def test_digits_split_is_fixed_stratified_and_complete() -> None:
    x_train, y_train, x_test, y_test = digits.load()
    assert x_train.shape == (1437, 28, 28) and x_test.shape == (digits.TEST_SAMPLES, 28, 28)
    assert x_train.dtype == x_test.dtype == np.uint8 and y_train.dtype == y_test.dtype == np.uint8
    of_digit = np.bincount(np.concatenate([y_train, y_test]))
    assert of_digit.sum() == digits.SAMPLES
    assert np.abs(np.bincount(y_test) - of_digit / 5).max() < 1
    # the digest was taken when the split was made: a change would make old and new results incomparable
    digest = "f1bf0b6131f6506a0b6c6266f769cb1337a5b54f7b437b6ecfa73e5a2949be3a"
    assert load_mnist("digits").fingerprint() == digest


# ---- where MNIST is looked for


def test_auto_takes_the_cache_else_the_digits(keras_home: Path) -> None:
    without = load_mnist("auto")
    assert without.name == "digits" and "--data mnist" in without.note and str(keras_home) in without.note
    write_npz(keras_home / "datasets" / "mnist.npz")
    with_cache = load_mnist("auto")
    assert with_cache.name == "mnist" and same(with_cache, small())
    assert "not the published file" in with_cache.note


def test_auto_never_uses_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_module, "download", lambda *_, **__: pytest.fail("surprise download"))
    load_mnist("auto")


# ---- what is refused: the message names the file, what was found and the way out, and the file stays


def broken_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """name -> (path to give, what the message must say)"""
    whole = write_npz(folder / "whole.npz").read_bytes()
    (folder / "cut").mkdir()
    (folder / "cut" / "mnist.npz").write_bytes(whole[: len(whole) // 2])
    (folder / "flipped.npz").write_bytes(whole[:200] + bytes([whole[200] ^ 255]) + whole[201:])
    (folder / "html.npz").write_bytes(b"<html>not found</html>")
    (folder / "empty.npz").write_bytes(b"")
    (folder / "text").write_text("hello")
    np.savez(folder / "keys.npz", x_train=small()["x_train"], images=np.zeros(3))
    wrong: dict[str, dict[str, Any]] = {
        "pickle": {"y_test": np.array([{}, {}, {}], object)},
        "lengths": {"y_test": np.zeros(2, np.uint8)},
        "labels": {"y_test": np.full(3, 10)},
        "floats": {"x_train": np.zeros((7, 28, 28))},
        "cifar": {"x_test": np.zeros((3, 32, 32, 3), np.uint8)},
        "none": {"x_test": np.zeros((0, 28, 28), np.uint8)},
    }
    for name, arrays in wrong.items():
        np.savez(folder / f"{name}.npz", **{**small(), **arrays})
    (folder / "strange").mkdir()
    (folder / "strange" / "cats.jpg").touch()
    return {
        "missing": (folder / "absent.npz", "no such file"),
        "cut": (folder / "cut", "cut/mnist.npz ("),
        "flipped": (folder / "flipped.npz", "flipped.npz ("),
        "html": (folder / "html.npz", "html.npz (22 bytes): starts with b'<html>"),
        "empty": (folder / "empty.npz", "(0 bytes): starts with b''"),
        "text": (folder / "text", "text (5 bytes): starts with b'hello'"),
        "keys": (folder / "keys.npz", "missing: y_train, x_test, y_test"),
        "pickle": (folder / "pickle.npz", "allow_pickle"),
        "lengths": (folder / "lengths.npz", "y_test is uint8 [2] for 3 images"),
        "labels": (folder / "labels.npz", "from 10 to 10"),
        "floats": (folder / "floats.npz", "x_train is float64 [7, 28, 28]"),
        "cifar": (folder / "cifar.npz", "x_test is uint8 [3, 32, 32, 3]"),
        "none": (folder / "none.npz", "x_test is uint8 [0, 28, 28]"),
        "strange": (folder / "strange", "holds cats.jpg"),
    }


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_broken_files_are_refused_and_kept(tmp_path: Path) -> None:
    cases = broken_files(tmp_path)
    before = snapshot(tmp_path)
    for name, (path, wanted) in cases.items():
        with pytest.raises(ConfigError) as caught:
            load_mnist(path)
        assert wanted in str(caught.value), name
        assert str(path) in str(caught.value), name
        assert caught.value.remedy, name
    assert snapshot(tmp_path) == before


# ---- the download


@pytest.fixture
def serve() -> Iterator[Callable[[bytes], str]]:
    """Serves one body on this machine and gives its address."""
    servers: list[ThreadingHTTPServer] = []

    def start(body: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if body else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/mnist.npz"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def body(tmp_path: Path) -> bytes:
    return write_npz(tmp_path / "served.npz").read_bytes()


def test_download_once_then_the_cache(
    serve: Callable[[bytes], str], body: bytes, keras_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv(variables.MNIST_URL, serve(body))
    monkeypatch.setattr(mnist, "MNIST_SHA256", hashlib.sha256(body).hexdigest())
    images = load_mnist("mnist")
    assert same(images, small()) and "not the published" not in images.note
    assert [entry.name for entry in (keras_home / "datasets").iterdir()] == ["mnist.npz"]
    monkeypatch.setenv(variables.MNIST_URL, "http://127.0.0.1:1/gone")
    assert same(load_mnist("mnist"), small())


def test_download_of_something_else_leaves_nothing(
    serve: Callable[[bytes], str], body: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    target = tmp_path / "cache" / "mnist.npz"
    limit: dict[str, Any] = {"size_limit_bytes": 10**6, "remedy": "do this"}
    good = hashlib.sha256(body).hexdigest()
    with pytest.raises(ConfigError, match="SHA-256"):
        download(serve(body), target, "0" * 64, **limit)
    with pytest.raises(ConfigError, match="404"):
        download(serve(b""), target, good, **limit)
    with pytest.raises(ConfigError, match="more than 100 bytes"):
        download(serve(body), target, good, **{**limit, "size_limit_bytes": 100})
    with pytest.raises(ConfigError, match="do this"):
        download("http://127.0.0.1:1/", target, good, **limit)
    with pytest.raises(ConfigError, match="unknown url type"):
        download("nonsense", target, good, **limit)
    assert list(target.parent.iterdir()) == []
    download(serve(body), target, good, **limit)  # the negative twin: the right hash passes
    assert target.read_bytes() == body


def test_the_hash_is_keras_own() -> None:
    source = importlib.util.find_spec("keras")
    if source is None or source.origin is None:
        pytest.skip("compares with the hash in Keras' own source, and Keras is not installed")
    text = (Path(source.origin).parent / "src/datasets/mnist.py").read_text()
    assert mnist.MNIST_SHA256 in text
    assert mnist.MNIST_URL.rsplit("/", 1)[0] + "/" in text


# ---- several ranks: threads that meet at a barrier stand in for them


class Threads:
    """A collective engine among threads of this process."""

    def __init__(self, size: int, ranks_per_node: int) -> None:
        self.size, self.ranks_per_node = size, ranks_per_node
        self.meeting = threading.Barrier(size, timeout=20)
        self.cards: list[bytes] = [b""] * size

    def world(self, rank: int) -> World:
        local_rank, node = rank % self.ranks_per_node, rank // self.ranks_per_node
        comm: Any = _ThreadEngine(self, rank)  # the part of an engine that reading takes
        return World(rank, self.size, local_rank, self.ranks_per_node, node, "threads", "threads", (), 0, comm=comm)

    def run(self, work: Callable[[World], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            try:
                results[rank] = work(self.world(rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        return results


class _ThreadEngine:
    name, devices = "threads", ()

    def __init__(self, group: Threads, rank: int) -> None:
        self.group, self.rank = group, rank

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        self.group.cards[self.rank] = data
        self.group.meeting.wait()
        cards = list(self.group.cards)
        self.group.meeting.wait()
        return cards


def test_one_rank_per_node_downloads(keras_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def fake(url: str, target: Path, *_: Any, **__: Any) -> None:
        calls.append(threading.current_thread().name)
        write_npz(target.with_name(f"{threading.get_ident()}.npz")).replace(target)

    monkeypatch.setattr(download_module, "download", fake)
    results = Threads(4, ranks_per_node=2).run(lambda world: load_mnist("mnist", world=world))
    assert all(same(images, small()) for images in results)
    assert 1 <= len(calls) <= 2  # two leaders; the second may find the first one's file in this shared cache
    assert len(set(calls)) == len(calls)


def test_one_ranks_failure_reaches_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(*_: Any, **__: Any) -> None:
        raise ConfigError("no network", "nothing", "get one")

    monkeypatch.setattr(download_module, "download", fake)
    results = Threads(4, ranks_per_node=4).run(lambda world: load_mnist("mnist", world=world))
    assert all(isinstance(error, ConfigError) and error.shared for error in results)
    assert {str(error) for error in results} == {"no network\n  received: on rank 0 of 4: nothing\n  fix: get one"}


def test_different_data_on_ranks_is_refused(tmp_path: Path) -> None:
    for rank in range(2):
        write_npz(tmp_path / f"{rank}.npz", **small(train=7 + rank))
    group = Threads(2, ranks_per_node=1)
    results = group.run(lambda world: load_mnist(tmp_path / f"{world.rank}.npz", world=world))
    assert all(isinstance(error, ReplicaError) for error in results)
    results = group.run(lambda world: load_mnist(tmp_path / "0.npz", world=world))  # the negative twin
    assert all(same(images, small()) for images in results)


def test_auto_decides_for_all_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache on one node only: all train on the digits, and the note says why."""
    here = threading.local()
    write_npz(tmp_path / "0" / "mnist.npz")
    monkeypatch.setattr(mnist, "keras_cache", lambda: tmp_path / str(here.rank) / "mnist.npz")

    def work(world: World) -> Any:
        here.rank = world.rank
        return load_mnist("auto", world=world)

    results = Threads(2, ranks_per_node=1).run(work)
    assert [images.name for images in results] == ["digits", "digits"]
    assert "on rank 1" in results[0].note
