"""MNIST from every source, the embedded digits, and what is refused."""

from __future__ import annotations

import hashlib
import importlib.util
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.core import variables
from hvdtrain.core.errors import ConfigError, ReplicaError
from hvdtrain.datasets import digits, load_mnist, mnist
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


# ---- what is refused: the message names the file, what was found and the way out, and the file stays


def broken_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yields (path to give, what the message must say)."""
    whole = write_npz(folder / "cut" / "mnist.npz").read_bytes()
    (folder / "cut" / "mnist.npz").write_bytes(whole[: len(whole) // 2])
    yield folder / "cut", "not a whole zip archive"
    yield folder / "absent.npz", "No such file"
    (folder / "html.npz").write_bytes(b"<html>not found</html>")
    yield folder / "html.npz", "not a whole zip archive"
    np.savez(folder / "keys.npz", x_train=small()["x_train"], images=np.zeros(3))
    yield folder / "keys.npz", "y_train is not a file in the archive"
    wrong: dict[str, dict[str, Any]] = {
        "allow_pickle": {"y_test": np.array([{}, {}, {}], object)},
        "y_test uint8 [2]": {"y_test": np.zeros(2, np.uint8)},
        "[ 0 10]": {"y_test": np.array([0, 1, 10])},
        "x_train float64 [7, 28, 28]": {"x_train": np.zeros((7, 28, 28))},
        "x_test uint8 [3, 32, 32, 3]": {"x_test": np.zeros((3, 32, 32, 3), np.uint8)},
        "x_test uint8 [0, 28, 28]": {"x_test": np.zeros((0, 28, 28), np.uint8), "y_test": np.zeros(0, np.uint8)},
    }
    for number, (said, arrays) in enumerate(wrong.items()):
        yield write_npz(folder / f"{number}.npz", **arrays), said


def test_broken_files_are_refused_and_kept(tmp_path: Path) -> None:
    for path, wanted in broken_files(tmp_path):
        before = path.read_bytes() if path.is_file() else None
        with pytest.raises(ConfigError) as caught:
            load_mnist(path)
        assert wanted in caught.value.received and str(path) in str(caught.value) and caught.value.remedy
        assert before == (path.read_bytes() if path.is_file() else None)


# ---- the download


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The published file, as far as hvdtrain knows, on a mirror."""
    path = write_npz(tmp_path / "served.npz")
    monkeypatch.setattr(mnist, "MNIST_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setenv(variables.MNIST_URL, path.as_uri())
    return path


def test_download_once_then_the_cache(published: Path, keras_home: Path) -> None:
    for _ in range(2):
        assert same(load_mnist("mnist"), small())
        published.unlink(missing_ok=True)
    assert [entry.name for entry in (keras_home / "datasets").iterdir()] == ["mnist.npz"]


def test_download_of_something_else_leaves_nothing(
    published: Path, keras_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (keras_home / "datasets").mkdir(parents=True)
    published.write_bytes(published.read_bytes()[:-1])
    for address, said in (
        (published.as_uri(), "its SHA-256 is "),
        ("http://127.0.0.1:1/", "refused"),
        ("nonsense", "unknown url type"),
    ):
        monkeypatch.setenv(variables.MNIST_URL, address)
        with pytest.raises(ConfigError, match="--data digits") as caught:
            load_mnist("mnist")
        assert said in caught.value.received and address in caught.value.rule
    assert list((keras_home / "datasets").iterdir()) == []


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


def test_one_rank_per_node_downloads(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Threads(4, ranks_per_node=2).run(lambda world: load_mnist("mnist", world=world))
    assert all(same(images, small()) for images in results)
    # two leaders; the second may find the first one's file in this shared cache
    assert 1 <= capsys.readouterr().out.count("downloading") <= 2


def test_one_ranks_failure_reaches_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variables.MNIST_URL, "http://127.0.0.1:1/gone")
    results = Threads(4, ranks_per_node=4).run(lambda world: load_mnist("mnist", world=world))
    assert all(isinstance(error, ConfigError) and error.shared for error in results)
    assert {error.received.split(": ")[0] for error in results} == {"on rank 0 of 4"}


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
    assert "not every rank has MNIST" in results[0].note
