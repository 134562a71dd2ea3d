"""MNIST for every rank: from a file, the Keras cache or a download, else the embedded digits.

Ranks decide together: either all of them hold the same pictures at the end, or all of them raise.
"""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path

from hvdtrain.core.world import World
from hvdtrain.datasets import digits, files
from hvdtrain.datasets.download import download
from hvdtrain.datasets.images import Images, as_rgb, count_of, keep_own, together

# The file, and the SHA-256, of keras.datasets.mnist (keras/src/datasets/mnist.py)
MNIST_URL = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz"
MNIST_SHA256 = "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1"
MNIST_BYTES = 11_490_434
URL_VARIABLE = "HVDTRAIN_MNIST_URL"  # a mirror of one's own; the hash holds for it too


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
        why = f"; no real MNIST at {cache}{_on_ranks(have_it)}: --data mnist downloads it"
    if source == "digits":
        work = partial(_digits, why)
    elif source == "mnist":
        together(world, partial(_ensure_cached, cache, downloads=world.local_rank == 0))
        work = partial(_from_cache, cache)
    else:
        work = partial(_from_path, Path(os.path.expanduser(source)))
    images = keep_own(world, work)
    world.agree("training data (SHA-256 of pictures and labels)", images.fingerprint())
    return images


def keras_cache() -> Path:
    """Where Keras keeps MNIST: `$KERAS_HOME/datasets/mnist.npz`, by default under `~/.keras`."""
    home = Path(os.path.expanduser(os.environ.get("KERAS_HOME") or "~/.keras"))
    return home / "datasets" / files.NPZ_NAME


def _digits(why: str) -> Images:
    x_train, y_train, x_test, y_test = digits.load()
    what = "real 8x8 handwritten digits (UCI), enlarged to 28x28"
    note = f"the embedded digits: {count_of(x_train, x_test)} {what}{why}"
    return Images("digits", x_train, y_train, x_test, y_test, note)


def load_digits(size: int = 32) -> Images:
    """Returns the embedded digits in colour, uint8 `[N, 3, size, size]`, for networks made for photographs."""
    x_train, y_train, x_test, y_test = digits.load(size)
    what = f"real 8x8 handwritten digits (UCI), enlarged to 3x{size}x{size}"
    note = f"the embedded digits: {count_of(x_train, x_test)} {what}"
    return as_rgb(Images("digits", x_train, y_train, x_test, y_test, note), size)


def _from_cache(cache: Path) -> Images:
    return _images(files.read(cache), cache, hashlib.sha256(cache.read_bytes()).hexdigest())


def _from_path(path: Path) -> Images:
    return _images(files.read(path), path, None)


def _images(arrays: files.Arrays, path: Path, sha256: str | None) -> Images:
    note = f"MNIST: {count_of(arrays['x_train'], arrays['x_test'])} pictures from {path}"
    if sha256 not in (None, MNIST_SHA256):
        note += f" (not the published file: SHA-256 {sha256})"
    return Images("mnist", **arrays, note=note)


def _ensure_cached(cache: Path, *, downloads: bool) -> None:
    """Downloads MNIST unless it is there, on the one rank of each node that does so."""
    if cache.is_file() or not downloads:
        return
    url = os.environ.get(URL_VARIABLE) or MNIST_URL
    print(f"downloading {url} ({MNIST_BYTES / 1e6:.0f} MB) to {cache}", flush=True)
    remedy = (
        "train on --data digits (built in, no network); copy mnist.npz there, or name one with --data PATH;\n"
        f"behind a proxy set https_proxy; for a mirror of your own set {URL_VARIABLE}"
    )
    download(url, cache, MNIST_SHA256, size_limit_bytes=2 * MNIST_BYTES, remedy=remedy)


def _on_ranks(have_it: list[bool]) -> str:
    lacking = [str(rank) for rank, has in enumerate(have_it) if not has]
    return "" if len(lacking) == len(have_it) else f" on rank {', '.join(lacking)}"
