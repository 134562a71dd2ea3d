"""MNIST for every rank: from a file, the Keras cache or a download, else the embedded digits.

Ranks decide together: either all of them hold the same pictures at the end, or all of them raise.
"""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path

from hvdtrain.core import variables
from hvdtrain.datasets import digits, files
from hvdtrain.datasets.download import fill_cache
from hvdtrain.datasets.images import Images, as_rgb, count_of, load_same, together
from hvdtrain.world.world import World

# The file, and the SHA-256, of keras.datasets.mnist (keras/src/datasets/mnist.py)
MNIST_URL = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz"
MNIST_SHA256 = "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1"
MNIST_BYTES = 11_490_434


def load_mnist(source: str | os.PathLike[str] = "auto", *, world: World | None = None) -> Images:
    """Loads the data on every rank; collective.

    Args:
        source: "auto" (the Keras cache if every rank has it, else the digits; never the network), "digits"
            (built in), "mnist" (the Keras cache, or a download into it by one rank per node), or the path of
            a `mnist.npz`, of an IDX file (gzipped or not) or of a folder with either.
        world: the ranks; None is this process alone.

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
        work = partial(_read, cache, published=True)
    else:
        work = partial(_read, Path(os.path.expanduser(source)), published=False)
    return load_same(world, work)


def keras_cache() -> Path:
    """Where Keras keeps MNIST: `$KERAS_HOME/datasets/mnist.npz`, by default under `~/.keras`."""
    home = Path(os.path.expanduser(os.environ.get("KERAS_HOME") or "~/.keras"))
    return home / "datasets" / files.NPZ_NAME


def load_digits(size: int = 32) -> Images:
    """Returns the embedded digits in colour, uint8 `[N, 3, size, size]`, for networks made for photographs."""
    return as_rgb(_digits(size, f"3x{size}x{size}"), size)


def _digits(size: int, enlarged: str) -> Images:
    x_train, y_train, x_test, y_test = digits.load(size)
    what = f"real 8x8 handwritten digits (UCI), enlarged to {enlarged}"
    note = f"the embedded digits: {count_of(x_train, x_test)} {what}"
    return Images("digits", x_train, y_train, x_test, y_test, note)


def _read(path: Path, *, published: bool) -> Images:
    arrays = files.read(path)
    note = f"MNIST: {count_of(arrays['x_train'], arrays['x_test'])} pictures from {path}"
    if published and (sha256 := hashlib.sha256(path.read_bytes()).hexdigest()) != MNIST_SHA256:
        note += f" (not the published file: SHA-256 {sha256})"
    return Images("mnist", **arrays, note=note)
