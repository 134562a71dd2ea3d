"""CIFAR-10 from its archive, a folder or a download, and what is refused; the pictures are small stand-ins."""

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


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(variables.CIFAR10_URL, raising=False)
    return tmp_path / "cache" / "hvdtrain"


def batch(number: int, pictures: int = 4) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.Generator(np.random.PCG64(number))
    return draw.integers(0, 256, (pictures, 3072), np.uint8), draw.integers(0, 10, pictures).astype(np.uint8)


def python(number: int) -> bytes:
    """As the published files: protocol 2, the keys and the state of the array as Python 2's byte strings."""
    pictures, labels = batch(number)
    return pickle.dumps({b"data": pictures, b"labels": labels.tolist(), b"batch_label": b"x"}, protocol=2)


def write_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for number, name in enumerate(BATCHES):
        (folder / name).write_bytes(python(number))
    (folder / "batches.meta").write_bytes(b"airplane")
    return folder


def write_archive(path: Path, leave_out: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for number, name in enumerate(BATCHES):
            content = python(number)
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            if name != leave_out:
                archive.addfile(member, io.BytesIO(content))
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


def test_archive_and_folder(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "a" / "cifar-10-python.tar.gz")
    folder = write_folder(tmp_path / "b" / "cifar-10-batches-py")
    for path in (archive, archive.parent, folder, folder.parent):
        check(load_cifar10(path))


def test_download_is_checked(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = write_archive(tmp_path / "served.tar.gz")
    monkeypatch.setenv(variables.CIFAR10_URL, archive.as_uri())
    with pytest.raises(ConfigError, match="SHA-256"):
        load_cifar10("cifar10")
    assert list(home.iterdir()) == []
    monkeypatch.setattr(cifar10, "CIFAR10_SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    check(load_cifar10("cifar10"))


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "was here"),)

    folder = write_folder(tmp_path / "data")
    evil = pickle.dumps({b"data": batch(0)[0], b"labels": Evil()}, protocol=2)
    (folder / "data_batch_3").write_bytes(evil)
    with pytest.raises(ConfigError, match=r"data_batch_3: UnpicklingError: it asks for posix.mkdir"):
        load_cifar10(folder)
    assert not (tmp_path / "was here").exists()
    pickle.loads(evil)  # the negative twin: Python's own reader runs it
    assert (tmp_path / "was here").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"no pickle", python(1)[:1000], pickle.dumps([1], 2), pickle.dumps({b"data": np.zeros(3)}, 2),
     pickle.dumps({b"data": np.zeros((2, 3072)), b"labels": [1, 2]}, 2),
     pickle.dumps({b"data": np.zeros((0, 3072), np.uint8), b"labels": []}, 2),
     pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 11]}, 2)],
)  # fmt: skip
def test_broken_batches(tmp_path: Path, content: bytes) -> None:
    folder = write_folder(tmp_path / "data")
    (folder / "data_batch_1").write_bytes(content)
    with pytest.raises(ConfigError, match="data_batch_1"):
        load_cifar10(folder)


def test_incomplete_and_other_files(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "cifar-10-python.tar.gz", leave_out="data_batch_4")
    with pytest.raises(ConfigError, match="lacks data_batch_4"):
        load_cifar10(archive)
    whole = write_archive(tmp_path / "whole.tar.gz").read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="must be readable as a whole"):
        load_cifar10(tmp_path / "cut.tar.gz")
    (tmp_path / "text.tar.gz").write_text("not an archive")
    with pytest.raises(ConfigError, match="start with b'not an a'"):
        load_cifar10(tmp_path / "text.tar.gz")
    folder = write_folder(tmp_path / "data")
    (folder / "test_batch").unlink()
    with pytest.raises(ConfigError, match="lacks test_batch"):
        load_cifar10(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds nothing"):
        load_cifar10(tmp_path / "empty")
