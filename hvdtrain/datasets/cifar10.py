"""CIFAR-10 for every rank: from an archive or folder, the cache, or a download that is checked against its hash.

The binary version is preferred: its files are bytes and nothing else. The Python version is pickled, and pickles can
run code; it is read by an unpickler that can make arrays, numbers and text, and refuses anything else.
"""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.world import World
from hvdtrain.datasets.download import download
from hvdtrain.datasets.images import Images, count_of, keep_own, together

if TYPE_CHECKING:
    import numpy as np

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
# also in GoMLX (examples/cifar) and red-datasets (lib/datasets/cifar.rb)
CIFAR10_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
CIFAR10_BYTES = 170_052_171
URL_VARIABLE = "HVDTRAIN_CIFAR10_URL"  # a mirror of one's own; the hash holds for it too
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PICTURE_BYTES = 3 * 32 * 32

ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")
FOLDERS = {".bin": "cifar-10-batches-bin", "": "cifar-10-batches-py"}
TRAIN, TEST = tuple(f"data_batch_{number}" for number in range(1, 6)), "test_batch"
_REPLACE = "put a good copy in its place, name another one with --data PATH, or train on --data digits"


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
        together(world, partial(_ensure_cached, cache(), downloads=world.local_rank == 0))
    path = cache() if source in ("auto", "cifar10") else Path(os.path.expanduser(source))
    images = keep_own(world, partial(read, path))
    world.agree("training data (SHA-256 of pictures and labels)", images.fingerprint())
    return images


def cache() -> Path:
    """Where downloads go: `$XDG_CACHE_HOME/hvdtrain`, by default under `~/.cache`."""
    home = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))
    return home / "hvdtrain" / ARCHIVES[0]


def _ensure_cached(target: Path, *, downloads: bool) -> None:
    if target.is_file() or not downloads:
        return
    url = os.environ.get(URL_VARIABLE) or CIFAR10_URL
    print(f"downloading {url} ({CIFAR10_BYTES / 1e6:.0f} MB) to {target}", flush=True)
    remedy = (
        f"train on --data digits (built in, no network); copy {ARCHIVES[0]} there, or name one with --data PATH;\n"
        f"behind a proxy set https_proxy; for a mirror of your own set {URL_VARIABLE}"
    )
    download(url, target, CIFAR10_SHA256, size_limit_bytes=2 * CIFAR10_BYTES, remedy=remedy)


def read(path: Path) -> Images:
    """Returns the pictures of an archive or folder.

    Raises:
        ConfigError: missing, incomplete, corrupt, or something else.
    """
    try:
        found = _find(path)
        parts = _from_archive(found) if found.is_file() else _from_folder(found)
    except (OSError, tarfile.TarError, zlib.error, EOFError) as error:
        raise ConfigError(f"{path} can be read whole", f"{type(error).__name__}: {error}", _REPLACE) from error
    import numpy as np

    x_train = np.concatenate([parts[name][0] for name in TRAIN])
    y_train = np.concatenate([parts[name][1] for name in TRAIN])
    note = f"CIFAR-10: {count_of(x_train, parts[TEST][0])} pictures from {found}"
    return Images("cifar10", x_train, y_train, *parts[TEST], note=note)


def _find(path: Path) -> Path:
    """The archive, or the folder with the batches, at `path` or directly in it."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(
            "CIFAR-10 is a file or folder that exists on every node",
            f"{path}: no such file or folder",
            "correct the path, download it with --data cifar10, or train on --data digits, which are built in",
        )
    for suffix, name in FOLDERS.items():
        for folder in (path, path / name):
            if any((folder / f"{part}{suffix}").is_file() for part in (*TRAIN, TEST)):
                return folder
    for name in ARCHIVES:
        if (path / name).is_file():
            return path / name
    names = sorted(entry.name for entry in path.iterdir())
    raise ConfigError(
        f"a folder with CIFAR-10 holds {' or '.join(ARCHIVES)}, or what is in them",
        f"{path} holds " + (", ".join(names[:8]) + (" ..." if len(names) > 8 else "") or "nothing"),
        _REPLACE,
    )


Parts = dict[str, tuple["np.ndarray", "np.ndarray"]]


def _from_folder(folder: Path) -> Parts:
    suffix = ".bin" if any((folder / f"{part}.bin").is_file() for part in (*TRAIN, TEST)) else ""
    names = {part: folder / f"{part}{suffix}" for part in (*TRAIN, TEST)}
    _all_there(str(folder), [file.name for file in names.values() if not file.is_file()])
    return {part: _parse(file.read_bytes(), str(file), suffix) for part, file in names.items()}


def _from_archive(path: Path) -> Parts:
    """Reads members by name; nothing is unpacked, so no member can write anywhere."""
    if not tarfile.is_tarfile(path):
        with path.open("rb") as opened:
            received = f"{path}: {path.stat().st_size} bytes that start with {opened.read(8)!r}"
        raise ConfigError(f"CIFAR-10 comes as {' or '.join(ARCHIVES)}", received, _REPLACE)
    parts: Parts = {}
    with tarfile.open(path) as archive:
        for member in archive:
            name = Path(member.name).name
            part, _, suffix = name.partition(".")
            if member.isfile() and part in (*TRAIN, TEST) and suffix in ("", "bin"):
                content = archive.extractfile(member)
                assert content is not None  # a regular file has content
                parts[part] = _parse(content.read(), f"{path}:{member.name}", f".{suffix}" if suffix else "")
    _all_there(str(path), [part for part in (*TRAIN, TEST) if part not in parts])
    return parts


def _all_there(where: str, missing: list[str]) -> None:
    if missing:
        raise ConfigError("CIFAR-10 has five batches for training and one for testing",
                          f"{where} lacks {', '.join(missing)}", _REPLACE)  # fmt: skip


def _parse(data: bytes, where: str, suffix: str) -> tuple[np.ndarray, np.ndarray]:
    """One batch file: pictures uint8 [n, 3, 32, 32] and labels uint8 [n]."""
    import numpy as np

    if suffix == ".bin":  # a byte of label, then the red, green and blue plane, row by row; again and again
        if not data or len(data) % (1 + PICTURE_BYTES):
            received = f"{where}: {len(data)} bytes"
            raise ConfigError(f"a batch has {1 + PICTURE_BYTES} bytes a picture", received, _REPLACE)
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
        raise ConfigError(f"pictures are uint8 [n, {PICTURE_BYTES}], labels 0 to 9", f"{where}: {wrong}", _REPLACE)
    return np.ascontiguousarray(pictures).reshape(-1, 3, 32, 32), labels.astype(np.uint8)


def _unpickled(data: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    import numpy as np

    try:
        batch = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        return np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
    # what a pickle that is cut off, or is no pickle, ends in
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        received = f"{where}: {type(error).__name__}: {error}"
        raise ConfigError(
            "a batch of the Python version is a pickled dictionary of arrays", received, _REPLACE
        ) from error


class _Unpickler(pickle.Unpickler):
    """Makes what the published files hold; a name that is not in the list is not looked up, let alone called."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        import codecs

        import numpy as np

        allowed: dict[tuple[str, str], Callable[..., Any]] = {
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): codecs.encode,
        }
        for core in ("numpy.core.multiarray", "numpy._core.multiarray"):  # before and since numpy 2
            allowed[core, "_reconstruct"] = _reconstruct
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR-10 file needs")
        return allowed[module, name]


def _reconstruct(kind: type, shape: tuple[int, ...], code: bytes) -> np.ndarray:
    """What numpy's function of this name does: an array that its pickled state then fills."""
    import numpy as np

    return np.ndarray.__new__(np.ndarray, shape, np.dtype("b"))
