"""MNIST for every rank: from a file, the Keras cache or a download, else the embedded digits."""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.core import variables
from hvdtrain.core.errors import ConfigError
from hvdtrain.datasets import digits
from hvdtrain.datasets.download import fill_cache
from hvdtrain.datasets.images import Images, as_rgb, contents, count_of, load_same, not_usable, start_of, together
from hvdtrain.world.world import World

if TYPE_CHECKING:
    import numpy as np

# The file, and the SHA-256, of keras.datasets.mnist (keras/src/datasets/mnist.py)
MNIST_URL = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz"
MNIST_SHA256 = "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1"
MNIST_BYTES = 11_490_434
NAME = "mnist.npz"
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
IMAGE_SIZE, CLASSES = 28, 10


def load_mnist(source: str | os.PathLike[str] = "auto", *, world: World | None = None) -> Images:
    """Loads MNIST on every rank; collective.

    Example:
        images = load_mnist("mnist", world=world)

    Args:
        source: "auto" (the Keras cache if every rank has it, else the digits; never the network), "digits" (built in),
            "mnist" (the Keras cache, or a download into it by one rank per node), or the path of a `mnist.npz` or of a
            folder with one.
        world: the ranks; None: this process alone.

    Raises:
        ConfigError: on every rank, if one of them cannot have the data.
        ReplicaError: on every rank, if they hold different data.
    """
    world = world or World.solo()
    cache, source, why = keras_cache(), os.fspath(source), ""
    if source == "auto":
        have_it = together(world, cache.is_file)
        source = "mnist" if all(have_it) else "digits"
        lacking = [str(rank) for rank, has in enumerate(have_it) if not has]
        ranks = f" on rank {', '.join(lacking)}" if any(have_it) else ""
        why = f"; no real MNIST at {cache}{ranks}: --data mnist downloads it"
    if source == "digits":
        work = partial(_digits, 28, f"28x28{why}")
    elif source == "mnist":
        fill_cache(world, cache, MNIST_URL, MNIST_SHA256, MNIST_BYTES, variable=variables.MNIST_URL)
        work = partial(_mnist, cache, published=True)
    else:
        work = partial(_mnist, Path(os.path.expanduser(source)), published=False)
    return load_same(world, work)


def keras_cache() -> Path:
    """Returns where Keras keeps MNIST: `$KERAS_HOME/datasets/mnist.npz`, by default under `~/.keras`."""
    home = Path(os.path.expanduser(os.environ.get("KERAS_HOME") or "~/.keras"))
    return home / "datasets" / NAME


def load_digits(size: int = 32) -> Images:
    """Returns the embedded digits in colour, uint8 `[N, 3, size, size]`, for networks made for photographs.

    Example:
        digits = load_digits()
        x_train, y_train = digits.x_train / 255, digits.y_train
    """
    return as_rgb(_digits(size, f"3x{size}x{size}"), size)


def _digits(size: int, enlarged: str) -> Images:
    x_train, y_train, x_test, y_test = digits.load(size)
    what = f"real 8x8 handwritten digits (UCI), enlarged to {enlarged}"
    note = f"the embedded digits: {count_of(x_train, x_test)} {what}"
    return Images("digits", x_train, y_train, x_test, y_test, note)


def _mnist(path: Path, *, published: bool) -> Images:
    arrays = read(path)
    note = f"MNIST: {count_of(arrays['x_train'], arrays['x_test'])} pictures from {path}"
    if published and (sha256 := hashlib.sha256(path.read_bytes()).hexdigest()) != MNIST_SHA256:
        note += f" (not the published file: SHA-256 {sha256})"
    return Images("mnist", **arrays, note=note)


# ---- the file


def read(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a `mnist.npz` or of a folder with one: `x_*` uint8 `[N, 28, 28]`, `y_*` uint8 `[N]` from 0
    to 9. Raises `ConfigError` for a missing, incomplete, corrupt or different file."""
    import numpy as np

    file = path / NAME if path.is_dir() else path
    try:
        if not file.is_file():
            received = contents(path) if path.is_dir() else f"{path}: no such file or folder"
            rule = f"--data must name a {NAME}, or a folder with one, on every node"
            raise ConfigError(rule, received, "correct the path, or train on --data digits, which are built in")
        start = start_of(file)
        if start[:2] != b"PK":
            raise ValueError(f"starts with {start!r}, not as a zip archive does")
        with np.load(file, allow_pickle=False) as stored:  # pickles could run code
            missing = [name for name in ARRAYS if name not in stored.files]
            if missing:
                received = f"{file} holds {', '.join(stored.files) or 'none'}; missing: {', '.join(missing)}"
                raise not_usable(f"an MNIST .npz must hold the arrays {', '.join(ARRAYS)}", received)
            arrays = {name: stored[name] for name in ARRAYS}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        size = "" if isinstance(error, OSError) else f" ({file.stat().st_size} bytes)"
        received = f"{file}{size}: {error}"
        raise not_usable("a .npz file must be a whole zip archive of numpy arrays", received) from error
    _check(arrays, file)
    return arrays


def _check(arrays: dict[str, np.ndarray], file: Path) -> None:
    """Makes the labels uint8; raises a ConfigError if an array is not as MNIST's."""
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
            rule = f"images must be uint8 [N, {IMAGE_SIZE}, {IMAGE_SIZE}], labels integers [N] 0 to {CLASSES - 1}"
            raise not_usable(rule, f"{file}: {wrong}")
        arrays[f"y_{part}"] = labels.astype(np.uint8)
