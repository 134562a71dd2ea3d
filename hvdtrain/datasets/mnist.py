"""MNIST for every rank: from a file, the Keras cache or a download, else the embedded digits."""

from __future__ import annotations

import os
import zipfile
from functools import partial
from pathlib import Path

from hvdtrain.core import variables
from hvdtrain.datasets import digits
from hvdtrain.datasets.download import fill_cache
from hvdtrain.datasets.images import Images, as_rgb, count_of, load_same, together, unusable
from hvdtrain.world.world import World

# The file, and the SHA-256, of keras.datasets.mnist (keras/src/datasets/mnist.py)
MNIST_URL = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz"
MNIST_SHA256 = "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1"
NAME = "mnist.npz"
ARRAYS = ("x_train", "y_train", "x_test", "y_test")


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
        source = "mnist" if all(together(world, cache.is_file)) else "digits"
        why = f"; not every rank has MNIST at {cache}: --data mnist downloads it"
    if source == "digits":
        return load_same(world, partial(_digits, 28, f"28x28{why}"))
    if source == "mnist":
        fill_cache(world, cache, MNIST_URL, MNIST_SHA256, variable=variables.MNIST_URL)
        return load_same(world, partial(read, cache))
    path = Path(os.path.expanduser(source))
    return load_same(world, partial(read, path / NAME if path.is_dir() else path))


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


def read(file: Path) -> Images:
    """Returns the pictures of a `mnist.npz`. Raises `ConfigError` for a missing, incomplete, corrupt or other file."""
    import numpy as np

    try:
        with file.open("rb") as opened:
            if not zipfile.is_zipfile(opened):
                raise ValueError("it is not a whole zip archive, as .npz files are")
        with np.load(file, allow_pickle=False) as stored:  # pickles could run code
            arrays = {name: stored[name] for name in ARRAYS}
        for part in ("train", "test"):
            x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
            if x.dtype != np.uint8 or x.shape != (*y.shape, 28, 28) or not y.size or not np.isin(y, range(10)).all():
                ends = np.unique(y)[[0, -1]] if y.size else y
                received = f"x_{part} {x.dtype} {list(x.shape)}, y_{part} {y.dtype} {list(y.shape)}, {ends}"
                raise ValueError(f"images must be uint8 [N, 28, 28], labels [N] 0 to 9: {received}")
            arrays[f"y_{part}"] = y.astype(np.uint8)
    except Exception as error:  # numpy raises many kinds for a file that is cut off, or is something else
        raise unusable(file, error) from error
    note = f"MNIST: {count_of(arrays['x_train'], arrays['x_test'])} pictures from {file}"
    return Images("mnist", **arrays, note=note)
