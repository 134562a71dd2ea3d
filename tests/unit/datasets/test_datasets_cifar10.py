"""CIFAR-10 from its archive, a folder with it or a download, and what is refused; the pictures are small stand-ins."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.core import variables
from hvdtrain.core.errors import ConfigError
from hvdtrain.datasets import cifar10, load_cifar10

BATCHES = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]


def batch(number: int, pictures: int = 4) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.Generator(np.random.PCG64(number))
    return draw.integers(0, 256, (pictures, 3072), np.uint8), draw.integers(0, 10, pictures).astype(np.uint8)


def python(number: int) -> bytes:
    """As the published files: protocol 2, the keys and the state of the array as Python 2's byte strings."""
    pictures, labels = batch(number)
    return pickle.dumps({b"data": pictures, b"labels": labels.tolist(), b"batch_label": b"x"}, protocol=2)


def write_archive(path: Path, contents: dict[str, bytes]) -> str:
    """Returns the file's SHA-256."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The published archive, as far as hvdtrain knows; and an empty cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "cifar-10-python.tar.gz"
    contents = {name: python(number) for number, name in enumerate(BATCHES)}
    monkeypatch.setattr(cifar10, "CIFAR10_SHA256", write_archive(path, contents))
    return path


def check(images: Any) -> None:
    assert (images.x_train.shape, images.x_test.shape) == ((20, 3, 32, 32), (4, 3, 32, 32))
    for number in range(5):
        pictures, labels = batch(number)
        part = slice(4 * number, 4 * number + 4)
        assert np.array_equal(images.x_train[part].reshape(4, 3072), pictures)
        assert np.array_equal(images.y_train[part], labels)
    assert np.array_equal(images.y_test, batch(5)[1]) and images.y_test.dtype == np.uint8
    assert images.name == "cifar10" and "20 training and 4 test" in images.note


def test_archive_and_folder(archive: Path) -> None:
    for path in (archive, archive.parent):
        check(load_cifar10(path))


def test_download_goes_into_the_cache(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot be read from .*cache/hvdtrain"):
        load_cifar10("auto")
    monkeypatch.setenv(variables.CIFAR10_URL, archive.as_uri())
    check(load_cifar10("cifar10"))
    check(load_cifar10("auto"))


def test_a_pickle_that_runs_code_is_not_opened(archive: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "was here"),)

    evil = pickle.dumps({b"data": batch(0)[0], b"labels": Evil()}, protocol=2)
    sha256 = write_archive(archive, dict.fromkeys(BATCHES, evil))
    with pytest.raises(ConfigError, match=f"its SHA-256 is {sha256}, not {cifar10.CIFAR10_SHA256}"):
        load_cifar10(archive)
    assert not (tmp_path / "was here").exists()
    pickle.loads(evil)  # the negative twin: Python's own reader runs it
    assert (tmp_path / "was here").exists()
