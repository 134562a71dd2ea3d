"""CIFAR-10 for every rank: from an archive or folder, the cache, or a download with a checked hash.

It is the "python version", which Keras and torchvision also keep. Its files are pickles, which can run code, so an
unpickler reads them that makes only arrays, numbers and text.
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

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
# also in Keras (keras/src/datasets/cifar10.py)
CIFAR10_SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
CIFAR10_BYTES = 170_498_071
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PICTURE_BYTES = 3 * 32 * 32

ARCHIVE, FOLDER = "cifar-10-python.tar.gz", "cifar-10-batches-py"
TRAIN, TEST = tuple(f"data_batch_{number}" for number in range(1, 6)), "test_batch"
BATCHES = (*TRAIN, TEST)


def load_cifar10(source: str | os.PathLike[str] = "auto", *, world: World | None = None) -> Images:
    """Loads CIFAR-10 on every rank; collective.

    Example:
        images = load_cifar10("cifar10", world=world)

    Args:
        source: "auto" (the cache, never the network), "cifar10" (the cache, or a download into it by one rank per
            node), or the path of an archive (Python version, `.tar.gz` or `.tar`) or of a folder that holds one,
            unpacked or not.
        world: the ranks; None: this process alone.

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
    """Returns where downloads go: `$XDG_CACHE_HOME/hvdtrain`, by default under `~/.cache`."""
    home = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))
    return home / "hvdtrain" / ARCHIVE


def read(path: Path) -> Images:
    """Returns the pictures of an archive or folder. Raises `ConfigError` if it is missing, incomplete or corrupt."""
    import numpy as np

    try:
        place = _find(path)
        parts = {name: _parse(data, where) for name, where, data in _batches(place)}
    except (OSError, tarfile.TarError, zlib.error, EOFError) as error:
        raise not_usable(f"{path} must be readable as a whole", f"{type(error).__name__}: {error}") from error
    missing = [name for name in BATCHES if name not in parts]
    if missing:
        received = f"{place} lacks {', '.join(missing)}"
        raise not_usable("CIFAR-10 must have five batches for training and one for testing", received)
    x_train, y_train = (np.concatenate([parts[name][kind] for name in TRAIN]) for kind in (0, 1))
    note = f"CIFAR-10: {count_of(x_train, parts[TEST][0])} pictures from {place}"
    return Images("cifar10", x_train, y_train, *parts[TEST], note=note)


def _find(path: Path) -> Path:
    """Returns the archive, or the folder with the batches, at `path` or directly in it."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(
            "CIFAR-10 must be a file or folder that exists on every node",
            f"{path}: no such file or folder",
            "correct the path, download it with --data cifar10, or train on --data digits, which are built in",
        )
    for folder in (path, path / FOLDER):
        if any((folder / name).is_file() for name in BATCHES):
            return folder
    if not (path / ARCHIVE).is_file():
        raise not_usable(f"a folder with CIFAR-10 must hold {ARCHIVE}, or what is in it", contents(path))
    return path / ARCHIVE


def _batches(place: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yields each batch of a folder or archive: name, place, content. Unpacks no member of an archive to disk."""
    if place.is_dir():
        for file in (place / name for name in BATCHES):
            if file.is_file():
                yield file.name, str(file), file.read_bytes()
        return
    if not tarfile.is_tarfile(place):
        received = f"{place}: {place.stat().st_size} bytes that start with {start_of(place, 8)!r}"
        raise not_usable(f"CIFAR-10 must come as {ARCHIVE}", received)
    with tarfile.open(place) as archive:
        for member in archive:
            name = Path(member.name).name
            content = archive.extractfile(member) if member.isfile() and name in BATCHES else None
            if content is not None:
                yield name, f"{place}:{member.name}", content.read()


def _parse(data: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns a batch file's pictures uint8 [n, 3, 32, 32] and labels uint8 [n]."""
    import numpy as np

    try:
        batch = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        pictures, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"]).reshape(-1)
    # what a pickle that is cut off, or is no pickle, ends in
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        received = f"{where}: {type(error).__name__}: {error}"
        raise not_usable("a batch of CIFAR-10 must be a pickled dictionary of arrays", received) from error
    wrong = ""
    if pictures.dtype != np.uint8 or pictures.shape != (labels.size, PICTURE_BYTES) or not labels.size:
        wrong = f"pictures are {pictures.dtype} {list(pictures.shape)} for {labels.size} labels"
    elif labels.min() < 0 or labels.max() >= len(CLASSES):
        wrong = f"labels from {labels.min()} to {labels.max()}"
    if wrong:
        raise not_usable(f"pictures must be uint8 [n, {PICTURE_BYTES}], labels 0 to 9", f"{where}: {wrong}")
    return pictures.reshape(-1, 3, 32, 32), labels.astype(np.uint8)


class _Unpickler(pickle.Unpickler):
    """Makes what the published files hold; a name that is not in the list is not looked up, let alone called."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        import numpy as np

        allowed: dict[tuple[str, str], Callable[..., Any]] = {
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): codecs.encode,
            # an array that its pickled state then fills; also since numpy 2
            ("numpy.core.multiarray", "_reconstruct"): lambda kind, shape, code: np.ndarray(shape, np.int8),
            ("numpy._core.multiarray", "_reconstruct"): lambda kind, shape, code: np.ndarray(shape, np.int8),
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR-10 file needs")
        return allowed[module, name]
