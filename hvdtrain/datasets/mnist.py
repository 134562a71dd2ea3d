"""MNIST for every rank: from a file, the Keras cache or a download, else the embedded digits.

Ranks decide together: either all of them hold the same pictures at the end, or all of them raise.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hvdtrain.datasets import digits, files
from hvdtrain.datasets.download import download
from hvdtrain.errors import ConfigError, HvdtrainError
from hvdtrain.world import World

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")

# The file, and the SHA-256, of keras.datasets.mnist (keras/src/datasets/mnist.py)
MNIST_URL = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz"
MNIST_SHA256 = "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1"
MNIST_BYTES = 11_490_434
URL_VARIABLE = "HVDTRAIN_MNIST_URL"  # a mirror of one's own; the hash holds for it too


@dataclass(frozen=True, eq=False)
class Images:
    """Pictures for training and testing.

    Attributes:
        name: "mnist" or "digits".
        x_train, x_test: uint8 ``[N, 28, 28]``, 0 (paper) to 255 (ink).
        y_train, y_test: uint8 ``[N]``, 0..9.
        note: one line that says what these are and where they came from.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    note: str

    def fingerprint(self) -> str:
        """SHA-256 over all pictures and labels: equal where ranks hold the same data."""
        digest = hashlib.sha256()
        for array in (self.x_train, self.y_train, self.x_test, self.y_test):
            digest.update(repr(array.shape).encode())
            digest.update(array.tobytes())
        return digest.hexdigest()


def load_mnist(source: str | os.PathLike[str] = "auto", *, world: World | None = None) -> Images:
    """Loads the data on every rank; collective.

    Args:
        source: "auto" (the Keras cache if every rank has it, else the digits; never the network), "digits"
            (built in), "mnist" (the Keras cache, or a download into it by one rank per node), or the path of
            a ``mnist.npz``, of an IDX file (gzipped or not) or of a folder with either.
        world: the ranks; None is this process alone.

    Raises:
        ConfigError: on every rank, if one of them cannot have the data.
        ReplicaError: on every rank, if they hold different data.
    """
    world = world or World.solo()
    cache, source, why = keras_cache(), os.fspath(source), ""
    if source == "auto":
        have_it = _together(world, cache.is_file)
        source = "mnist" if all(have_it) else "digits"
        why = f"; no real MNIST at {cache}{_on_ranks(have_it)}: --data mnist downloads it"
    if source == "digits":
        work = partial(_digits, why)
    elif source == "mnist":
        _together(world, partial(_ensure_cached, cache, downloads=world.local_rank == 0))
        work = partial(_from_cache, cache)
    else:
        work = partial(_from_path, Path(os.path.expanduser(source)))
    images = _keep_own(world, work)
    world.agree("training data (SHA-256 of pictures and labels)", images.fingerprint())
    return images


def keras_cache() -> Path:
    """Where Keras keeps MNIST: ``$KERAS_HOME/datasets/mnist.npz``, by default under ``~/.keras``."""
    home = Path(os.path.expanduser(os.environ.get("KERAS_HOME") or "~/.keras"))
    return home / "datasets" / files.NPZ_NAME


def _digits(why: str) -> Images:
    x_train, y_train, x_test, y_test = digits.load()
    what = "real 8x8 handwritten digits (UCI), enlarged to 28x28"
    note = f"the embedded digits: {_count(x_train, x_test)} {what}{why}"
    return Images("digits", x_train, y_train, x_test, y_test, note)


def _from_cache(cache: Path) -> Images:
    return _images(files.read(cache), cache, hashlib.sha256(cache.read_bytes()).hexdigest())


def _from_path(path: Path) -> Images:
    return _images(files.read(path), path, None)


def _images(arrays: files.Arrays, path: Path, sha256: str | None) -> Images:
    note = f"MNIST: {_count(arrays['x_train'], arrays['x_test'])} pictures from {path}"
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


def _keep_own(world: World, work: Callable[[], T]) -> T:
    """`_together` for results that are too big to be sent around."""
    kept: list[T] = []
    _together(world, lambda: kept.append(work()))
    return kept[0]


def _together(world: World, work: Callable[[], T]) -> list[T]:
    """Runs ``work`` on every rank; returns all results, in rank order. A failure on one is raised on all."""
    try:
        outcome: tuple[T | None, tuple[str, str, str] | None] = (work(), None)
    except HvdtrainError as error:
        outcome = (None, (error.rule, error.came, error.remedy))
    except Exception as error:  # a bug of ours: no rank is left waiting for it either
        outcome = (None, (f"{type(error).__name__} while loading the data: {error}", "", ""))
    outcomes = world.gather(outcome)
    failed = {rank: failure for rank, (_, failure) in enumerate(outcomes) if failure is not None}
    if failed:
        rank, (rule, came, remedy) = next(iter(failed.items()))
        if len(failed) < world.size:
            came = f"on rank {', '.join(map(str, failed))} of {world.size}: {came}"
        raise ConfigError(rule, came, remedy, shared=True)
    return [result for result, _ in outcomes]  # type: ignore[misc]


def _count(x_train: np.ndarray, x_test: np.ndarray) -> str:
    return f"{len(x_train):,} training and {len(x_test):,} test"


def _on_ranks(have_it: list[bool]) -> str:
    lacking = [str(rank) for rank, has in enumerate(have_it) if not has]
    return "" if len(lacking) == len(have_it) else f" on rank {', '.join(lacking)}"
