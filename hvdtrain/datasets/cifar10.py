"""CIFAR-10 for every rank: the published archive (its "python version"), from a path, the cache, or a download.

The archive holds pickles, which can run code. So only a file with the published hash is opened.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
from functools import partial
from pathlib import Path

from hvdtrain.core import variables
from hvdtrain.datasets.download import fill_cache
from hvdtrain.datasets.images import Images, count_of, load_same, unusable
from hvdtrain.world.world import World

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
# also in Keras (keras/src/datasets/cifar10.py)
CIFAR10_SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
NAME = "cifar-10-python.tar.gz"
TRAIN, TEST = tuple(f"data_batch_{number}" for number in range(1, 6)), "test_batch"


def load_cifar10(source: str | os.PathLike[str] = "auto", *, world: World | None = None) -> Images:
    """Loads CIFAR-10 on every rank; collective.

    Example:
        images = load_cifar10("cifar10", world=world)

    Args:
        source: "auto" (the cache, never the network), "cifar10" (the cache, or a download into it by one rank per
            node), or the path of the published `cifar-10-python.tar.gz` or of a folder with it.
        world: the ranks; None: this process alone.

    Returns:
        uint8 `[50000|10000, 3, 32, 32]` red, green, blue, and labels: airplane, automobile, bird, cat, deer, dog, frog,
        horse, ship, truck.

    Raises:
        ConfigError: on every rank, if one of them cannot have the data.
        ReplicaError: on every rank, if they hold different data.
    """
    world = world or World.solo()
    source = os.fspath(source)
    if source == "cifar10":
        fill_cache(world, cache(), CIFAR10_URL, CIFAR10_SHA256, variable=variables.CIFAR10_URL)
    path = cache() if source in ("auto", "cifar10") else Path(os.path.expanduser(source))
    return load_same(world, partial(read, path / NAME if path.is_dir() else path))


def cache() -> Path:
    """Returns where downloads go: `$XDG_CACHE_HOME/hvdtrain`, by default under `~/.cache`."""
    home = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))
    return home / "hvdtrain" / NAME


def read(file: Path) -> Images:
    """Returns the pictures of the published archive. Raises `ConfigError` for a missing or any other file."""
    import numpy as np

    try:
        content = file.read_bytes()
    except OSError as error:
        raise unusable(file, error) from error
    found = hashlib.sha256(content).hexdigest()
    if found != CIFAR10_SHA256:
        raise unusable(file, ValueError(f"not the published {NAME}: its SHA-256 is {found}, not {CIFAR10_SHA256}"))
    pictures, labels = {}, {}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for name in (*TRAIN, TEST):
            member = archive.extractfile(f"cifar-10-batches-py/{name}")
            assert member is not None  # it is a file
            batch = pickle.load(member, encoding="bytes")
            pictures[name] = batch[b"data"].reshape(-1, 3, 32, 32)
            labels[name] = np.array(batch[b"labels"], np.uint8)
    x_train, y_train = (np.concatenate([of[name] for name in TRAIN]) for of in (pictures, labels))
    note = f"CIFAR-10: {count_of(x_train, pictures[TEST])} pictures from {file}"
    return Images("cifar10", x_train, y_train, pictures[TEST], labels[TEST], note)
