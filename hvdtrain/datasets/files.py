"""Reads MNIST files: numpy's `mnist.npz` as Keras ships it, and the original IDX files, gzipped or not.

Whatever is wrong with a file is one `ConfigError` that names the file, what was found in it and what to do.
Files are only ever read.
"""

from __future__ import annotations

import gzip
import math
import struct
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.core.errors import ConfigError
from hvdtrain.datasets.images import contents, not_usable, start_of

if TYPE_CHECKING:
    import numpy as np

Arrays = dict[str, "np.ndarray"]  # x_train, y_train, x_test, y_test

NPZ_NAME = "mnist.npz"
# array -> the published file names (http://yann.lecun.com/exdb/mnist); some unpackers write '.' for the '-'
IDX_STEMS = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}
IMAGE_SIZE, CLASSES = 28, 10


def read(path: Path) -> Arrays:
    """The four arrays of a `.npz` file, of an IDX file's folder, or of a folder that holds either.

    Returns: `x_*` uint8 `[N, 28, 28]` and `y_*` uint8 `[N]` with values 0..9.
    Raises: `ConfigError` for a missing, incomplete, corrupt or different file.
    """
    try:
        if path.is_dir():
            return _checked(_read_folder(path), path)
        if path.is_file():
            # by its name or by its first bytes, so that a broken `mnist.npz` is reported as such
            is_zip = path.suffix == ".npz" or start_of(path, 2) == b"PK"
            return _checked(_read_npz(path) if is_zip else _read_neighbours(path), path)
    except OSError as error:
        raise not_usable(f"{path} cannot be read", f"{type(error).__name__}: {error}") from error
    raise ConfigError(
        "--data names a file or folder that exists on every node",
        f"{path}: no such file or folder",
        "correct the path, or train on --data digits, which are built in",
    )


def holds(folder: Path) -> bool:
    """Whether `read` would look for MNIST in this folder: it has a `.npz` or an IDX file under its published name."""
    return (folder / NPZ_NAME).is_file() or _idx_files(folder) is not None


def _idx_files(folder: Path) -> tuple[Path, dict[str, Path | None]] | None:
    """Which of the IDX files are where, in the first place that has any."""
    for place in (folder, folder / "MNIST" / "raw"):  # the second is where torchvision unpacks to
        found = {array: _idx_file(place, stem) for array, stem in IDX_STEMS.items()}
        if any(found.values()):
            return place, found
    return None


def _read_folder(folder: Path) -> Arrays:
    if (folder / NPZ_NAME).is_file():
        return _read_npz(folder / NPZ_NAME)
    at = _idx_files(folder)
    if at is None:
        raise ConfigError(
            f"a data folder holds {NPZ_NAME}, or the four IDX files ({', '.join(IDX_STEMS.values())})",
            contents(folder),
            "name the folder or file with --data PATH, or train on --data digits, which are built in",
        )
    place, found = at
    missing = [IDX_STEMS[array] for array, file in found.items() if file is None]
    if missing:
        received = f"{place} lacks {', '.join(missing)} (with or without .gz)"
        raise ConfigError("a folder with IDX files holds all four of them", received, "add the missing files")
    return {array: _read_idx(file) for array, file in found.items() if file is not None}


def _read_neighbours(file: Path) -> Arrays:
    """One of the four IDX files was named: all four lie beside it."""
    plain = file.name.removesuffix(".gz").replace(".idx", "-idx")
    if plain in IDX_STEMS.values():
        return _read_folder(file.parent)
    raise not_usable(
        "an MNIST file is a mnist.npz (a zip archive), or an IDX file under its published name",
        f"{file}: {file.stat().st_size} bytes that start with {start_of(file)!r}",
    )


def _idx_file(folder: Path, stem: str) -> Path | None:
    names = (stem, stem.replace("-idx", ".idx"))
    candidates = (folder / f"{name}{suffix}" for name in names for suffix in ("", ".gz"))
    return next((file for file in candidates if file.is_file()), None)


def _read_npz(file: Path) -> Arrays:
    import numpy as np

    try:
        start = start_of(file)
        if start[:2] != b"PK":
            raise ValueError(f"starts with {start!r}, not as a zip archive does")
        with np.load(file, allow_pickle=False) as stored:  # pickles could run code
            missing = [name for name in IDX_STEMS if name not in stored.files]
            if missing:
                raise not_usable(
                    "an MNIST .npz holds the arrays x_train, y_train, x_test and y_test",
                    f"{file} holds {', '.join(stored.files) or 'none'}; missing: {', '.join(missing)}",
                )
            return {name: stored[name] for name in IDX_STEMS}
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        received = f"{file} ({file.stat().st_size} bytes): {error}"
        raise not_usable("a .npz file is a whole zip archive of numpy arrays", received) from error


def _read_idx(file: Path) -> np.ndarray:
    """One IDX file: two zero bytes, type 8 (uint8), number of dimensions, big-endian sizes, the values."""
    import numpy as np

    try:
        raw = file.read_bytes()
        data = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        if len(data) < 4 or data[:3] != b"\0\0\x08":
            raise ValueError(f"starts with {data[:4]!r}, not with an IDX header of unsigned bytes")
        start = 4 + 4 * data[3]
        shape = struct.unpack(f">{data[3]}I", data[4:start])
        if len(data) - start != math.prod(shape):
            raise ValueError(f"the header says {shape}, but {len(data) - start} values follow")
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile, struct.error) as error:
        received = f"{file} ({file.stat().st_size} bytes): {error}"
        raise not_usable("an IDX file is whole", received) from error
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _checked(arrays: Arrays, path: Path) -> Arrays:
    """The arrays with labels as uint8, or `ConfigError` if one of them is not what MNIST's are."""
    import numpy as np

    for part in ("train", "test"):
        images, labels = arrays[f"x_{part}"], arrays[f"y_{part}"]
        wrong = ""
        if images.dtype != np.uint8 or images.shape[1:] != (IMAGE_SIZE, IMAGE_SIZE) or not len(images):
            wrong = f"x_{part} is {images.dtype} {list(images.shape)}"
        elif labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
            wrong = f"y_{part} is {labels.dtype} {list(labels.shape)} for {len(images)} images"
        elif labels.min() < 0 or labels.max() >= CLASSES:
            wrong = f"y_{part} has labels from {labels.min()} to {labels.max()}"
        if wrong:
            rule = f"images are uint8 [N, {IMAGE_SIZE}, {IMAGE_SIZE}], labels integers [N] 0 to {CLASSES - 1}"
            raise not_usable(rule, f"{path}: {wrong}")
        arrays[f"y_{part}"] = labels.astype(np.uint8)
    return arrays
