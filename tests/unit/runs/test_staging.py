"""Files of a checkpoint in memory, and on disk."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import numpy as np
from harness import quick_folder
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.checkpoint.staging import StagedFiles, StateFile, write_image

WRITES = st.lists(st.tuples(st.integers(0, 300), st.binary(max_size=200)), max_size=8)


def image(images: StagedFiles, name: str, size: int) -> bytes:
    return os.pread(images.descriptor(name), size, 0)


@given(st.lists(WRITES, min_size=1, max_size=4))
def test_an_image_is_what_was_written_whatever_was_there_before(writes_of_each: list[list[tuple[int, bytes]]]) -> None:
    """Written anew, shorter or longer, with seeks back: as zip archives are."""
    images = StagedFiles()
    for writes in writes_of_each:
        plain, file = io.BytesIO(), images.file("x")
        for place, data in writes:
            at = min(place, len(plain.getvalue()))  # no holes
            assert plain.seek(at) == file.seek(at)
            assert plain.write(data) == file.write(data) and plain.tell() == file.tell()
        assert file.size == len(plain.getvalue())
        assert image(images, "x", file.size) == plain.getvalue()


@given(st.binary(max_size=3000), st.dictionaries(st.sampled_from("abcd"), st.binary(max_size=200)))
def test_an_entry_is_put_into_its_archive(entry: bytes, others: dict[str, bytes]) -> None:
    images, archive = StagedFiles(), io.BytesIO()
    images.file("x").write(bytes(range(256)) * 20)
    with zipfile.ZipFile(archive, "w") as made:
        for name, data in others.items():
            made.writestr(name, data)
    file = images.file("x")
    file.write(entry)
    file.truncate()
    file.seek(0)
    assert file.read(len(entry)) == entry
    file.write(archive.getvalue())
    with quick_folder() as folder:
        target = StateFile.on_disk(folder / "x")
        with target:
            write_image(images.descriptor("x"), file.size, ("the entry", len(entry)), target)
        assert target.size == (folder / "x").stat().st_size
        with zipfile.ZipFile(folder / "x") as found:
            assert {name: found.read(name) for name in found.namelist()} == {**others, "the entry": entry}


def test_libraries_write_it(tmp_path: Path) -> None:
    images = StagedFiles()
    values = np.arange(6.0).reshape(2, 3)
    for file in (images.file("a.npz"), images.file("a.npz"), StateFile.on_disk(tmp_path / "a.npz")):
        np.savez(file, values=values, nothing=np.zeros((0, 3)))
        file.write(np.zeros((0, 3)))  # an empty view has no bytes to cast
        data = os.pread(file.fileno(), file.size, 0)
        assert np.array_equal(np.load(io.BytesIO(data))["values"], values)
        assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
        file.close()
    assert str(images.file("model.keras")) == "model.keras"
