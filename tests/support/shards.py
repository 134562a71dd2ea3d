"""Tar shards, as webdataset has them: written and read with the standard library."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

SHARDS, EACH = 3, 10


def features(seed: int, rows: int) -> np.ndarray:
    """Returns float64 [rows, 4]."""
    return np.random.Generator(np.random.PCG64(seed)).normal(size=(rows, 4))


def write_shards(folder: Path) -> Path:
    """Writes `SHARDS` shards of `EACH` records: the bytes of four numbers (".x"), and a class (".cls")."""
    folder.mkdir()
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:03}.tar", "w") as tar:
            for row, x in enumerate(features(shard, EACH)):
                for end, content in (("x", x.tobytes()), ("cls", str(shard * EACH + row).encode())):
                    member = tarfile.TarInfo(f"{row:04}.{end}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return folder


def read_shards(paths: Sequence[Path]) -> Iterator[dict[str, bytes]]:
    """Yields the records of shards, one after another: the files that share a name, by their extensions."""
    for path in paths:
        with tarfile.open(path) as tar:
            name = ""
            record: dict[str, bytes] = {}
            for member in tar:
                stem, _, end = member.name.partition(".")
                if record and stem != name:
                    yield record
                    record = {}
                file = tar.extractfile(member)
                assert file is not None
                name, record[end] = stem, file.read()
            yield record
