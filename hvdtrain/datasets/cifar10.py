"""CIFAR-10 for every rank: from an archive or folder, the cache, or a download that is checked against its hash.

The binary version is preferred: its files are bytes and nothing else. The Python version is pickled, and pickles can
run code; it is read by an unpickler that can make arrays, numbers and text, and refuses anything else.
"""

from __future__ import annotations

import codecs
import io
import os
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.core import variables
from hvdtrain.core.errors import ConfigError
from hvdtrain.datasets.download import fill_cache
from hvdtrain.datasets.images import Images, contents, count_of, load_same, not_usable, start_of
from hvdtrain.world.world import World

if TYPE_CHECKING:
    import numpy as np

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
# also in GoMLX (examples/cifar) and red-datasets (lib/datasets/cifar.rb)
CIFAR10_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
CIFAR10_BYTES = 170_052_171
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PICTURE_BYTES = 3 * 32 * 32

ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")
FOLDERS = {".bin": "cifar-10-batches-bin", "": "cifar-10-batches-py"}
TRAIN, TEST = tuple(f"data_batch_{number}" for number in range(1, 6)), "test_batch"
BATCHES = (*TRAIN, TEST)


def load_cifar10(source: str | os.PathLike[str] = "auto", *, world: World | None = None) -> Images:
    """Loads the data on every rank; collective.

    Args:
        source: the path of an archive (binary or Python version, `.tar.gz` or `.tar`) or of a folder that holds
            one, unpacked or not; "auto" (the cache, never the network) or "cifar10" (the cache, or a download into
            it by one rank per node).
        world: the ranks; None is this process alone.

    Returns:
        uint8 `[50000|10000, 3, 32, 32]` red, green, blue, and labels in the order of `CLASSES`.

    Raises:
        ConfigError: on every rank, if one of them cannot have the data.
        ReplicaError: on every rank, if they hold different data.
    """
    world = world or World.solo()
    source = os.fspath(source)
    if source == "cifar10":
        fill_cache(world, cache(), CIFAR10_URL, CIFAR10_SHA256, CIFAR10_BYTES, variable=variables.CIFAR10_URL)
    path = cache() if source in ("auto", "cifar10") else Path(os.path.expanduser(source))
    return load_same(world, partial(read, path))


def cache() -> Path:
    """Where downloads go: `$XDG_CACHE_HOME/hvdtrain`, by default under `~/.cache`."""
    home = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))
    return home / "hvdtrain" / ARCHIVES[0]


def read(path: Path) -> Images:
    """Returns the pictures of an archive or folder.

    Raises:
        ConfigError: missing, incomplete, corrupt, or something else.
    """
    import numpy as np

    try:
        found, suffix = _find(path)
        batches = _of_archive(found) if found.is_file() else _of_folder(found, suffix)
        parts = {name: _parse(data, where, ending) for name, ending, where, data in batches}
    except (OSError, tarfile.TarError, zlib.error, EOFError) as error:
        raise not_usable(f"{path} can be read whole", f"{type(error).__name__}: {error}") from error
    missing = [f"{name}{suffix}" for name in BATCHES if name not in parts]
    if missing:
        received = f"{found} lacks {', '.join(missing)}"
        raise not_usable("CIFAR-10 has five batches for training and one for testing", received)
    x_train, y_train = (np.concatenate([parts[name][kind] for name in TRAIN]) for kind in (0, 1))
    note = f"CIFAR-10: {count_of(x_train, parts[TEST][0])} pictures from {found}"
    return Images("cifar10", x_train, y_train, *parts[TEST], note=note)


def _find(path: Path) -> tuple[Path, str]:
    """The archive, or the folder with the batches and what their names end in, at `path` or directly in it."""
    if path.is_file():
        return path, ""
    if not path.is_dir():
        raise ConfigError(
            "CIFAR-10 is a file or folder that exists on every node",
            f"{path}: no such file or folder",
            "correct the path, download it with --data cifar10, or train on --data digits, which are built in",
        )
    for suffix, name in FOLDERS.items():
        for folder in (path, path / name):
            if any((folder / f"{part}{suffix}").is_file() for part in BATCHES):
                return folder, suffix
    for name in ARCHIVES:
        if (path / name).is_file():
            return path / name, ""
    raise not_usable(f"a folder with CIFAR-10 holds {' or '.join(ARCHIVES)}, or what is in them", contents(path))


def _of_folder(folder: Path, suffix: str) -> Iterator[tuple[str, str, str, bytes]]:
    """Each batch that is there: name, suffix, where it is, content."""
    for name in BATCHES:
        file = folder / f"{name}{suffix}"
        if file.is_file():
            yield name, suffix, str(file), file.read_bytes()


def _of_archive(path: Path) -> Iterator[tuple[str, str, str, bytes]]:
    """As `_of_folder`. Reads members by name; nothing is unpacked, so no member can write anywhere."""
    if not tarfile.is_tarfile(path):
        received = f"{path}: {path.stat().st_size} bytes that start with {start_of(path, 8)!r}"
        raise not_usable(f"CIFAR-10 comes as {' or '.join(ARCHIVES)}", received)
    with tarfile.open(path) as archive:
        for member in archive:
            name, dot, ending = Path(member.name).name.partition(".")
            if member.isfile() and name in BATCHES and ending in ("", "bin"):
                content = archive.extractfile(member)
                assert content is not None  # a regular file has content
                yield name, dot + ending, f"{path}:{member.name}", content.read()


def _parse(data: bytes, where: str, suffix: str) -> tuple[np.ndarray, np.ndarray]:
    """One batch file: pictures uint8 [n, 3, 32, 32] and labels uint8 [n]."""
    import numpy as np

    if suffix == ".bin":  # a byte of label, then the red, green and blue plane, row by row; again and again
        if not data or len(data) % (1 + PICTURE_BYTES):
            raise not_usable(f"a batch has {1 + PICTURE_BYTES} bytes a picture", f"{where}: {len(data)} bytes")
        rows = np.frombuffer(data, np.uint8).reshape(-1, 1 + PICTURE_BYTES)
        pictures, labels = rows[:, 1:], rows[:, 0]
    else:
        pictures, labels = _unpickled(data, where)
    wrong = ""
    if pictures.dtype != np.uint8 or pictures.shape != (len(labels), PICTURE_BYTES):
        wrong = f"pictures are {pictures.dtype} {list(pictures.shape)} for {len(labels)} labels"
    elif labels.min() < 0 or labels.max() >= len(CLASSES):
        wrong = f"labels from {labels.min()} to {labels.max()}"
    if wrong:
        raise not_usable(f"pictures are uint8 [n, {PICTURE_BYTES}], labels 0 to 9", f"{where}: {wrong}")
    return np.ascontiguousarray(pictures).reshape(-1, 3, 32, 32), labels.astype(np.uint8)


def _unpickled(data: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    import numpy as np

    try:
        batch = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        return np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
    # what a pickle that is cut off, or is no pickle, ends in
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        received = f"{where}: {type(error).__name__}: {error}"
        raise not_usable("a batch of the Python version is a pickled dictionary of arrays", received) from error


class _Unpickler(pickle.Unpickler):
    """Makes what the published files hold; a name that is not in the list is not looked up, let alone called."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        import numpy as np

        allowed: dict[tuple[str, str], Callable[..., Any]] = {
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): codecs.encode,
            ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
            ("numpy._core.multiarray", "_reconstruct"): _reconstruct,  # since numpy 2
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR-10 file needs")
        return allowed[module, name]


def _reconstruct(kind: type, shape: tuple[int, ...], code: bytes) -> np.ndarray:
    """What numpy's function of this name does: an array that its pickled state then fills."""
    import numpy as np

    return np.ndarray.__new__(np.ndarray, shape, np.dtype("b"))
