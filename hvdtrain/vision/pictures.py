"""The pictures that the PyTorch programs train on, by the name or the path that the user gives."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain import datasets
from hvdtrain.core.errors import ConfigError
from hvdtrain.datasets import cifar10, mnist
from hvdtrain.datasets.images import together
from hvdtrain.world.world import World

if TYPE_CHECKING:
    import numpy as np

NAMES = ("digits", "cifar10", "mnist", "synthetic")
IMAGE_SIZE = 224
# a variance that is nothing but rounding
EVEN = 1e-12


@dataclass(frozen=True, eq=False)
class ImageData:
    """Pictures for training and testing."""

    recipe: str  # which of `recipes.RECIPES` is right for them
    note: str  # one line that says what these are and where they came from
    sha256: str  # of the data; equal where ranks hold the same, and where a run may go on
    classes: int  # how many
    image_size: int  # pixels on a side, as the model gets them
    train: Any  # train, val: what `hvdtrain.torch.loader` takes
    val: Any
    samples: int  # samples, val_samples: how many pictures are in each
    val_samples: int
    augment: Any  # augment, val_augment: what makes whole batches of them into the model's input
    val_augment: Any
    in_memory: bool = True  # no files are read while training


def load(source: str, *, world: World, image_size: int | None = None, strict: bool = False) -> ImageData:
    """Loads the data on every rank; collective. Needs PyTorch.

    Args:
        source: "auto" (CIFAR-10 if every rank has it in its cache, else the digits; never the network), "digits",
            "cifar10", "mnist", "synthetic"; or a path: of a folder in ImageNet's layout, of CIFAR-10's archive, of
            `mnist.npz`, or of a folder with one of these two.
        world: the ranks.
        image_size: pixels on a side of a folder's or synthetic pictures; None: 224.
        strict: a picture that cannot be read is an error; else it is skipped and reported.

    Raises:
        ConfigError: on every rank, if one of them cannot get the data.
        ReplicaError: on every rank, if they hold different data.
    """
    if source == "auto":
        source = "cifar10" if all(together(world, cifar10.cache().is_file)) else "digits"
    kind = kind_of(source)
    if kind == "folder":
        return _folder(source, world, image_size or IMAGE_SIZE, strict=strict)
    if kind == "synthetic":
        return _in_memory(datasets.synthetic(size=image_size or IMAGE_SIZE), kind, pad=0, flip=True)
    if kind == "cifar10":
        return _in_memory(datasets.load_cifar10(source, world=world), kind, pad=4, flip=True)
    # digits have a right and a left: no mirror images
    if kind == "digits":
        return _in_memory(datasets.load_digits(), kind, pad=2, flip=False)
    return _in_memory(datasets.as_rgb(datasets.load_mnist(source, world=world)), kind, pad=2, flip=False)


def kind_of(source: str) -> str:
    """Returns the kind of data that a name or a path means: one of `NAMES`, or "folder"."""
    if source in NAMES:
        return source
    path = Path(os.path.expanduser(source))
    if (path / "train").is_dir():
        return "folder"
    for kind, name in (("mnist", mnist.NAME), ("cifar10", cifar10.NAME)):
        if path.suffix == Path(name).suffix or (path / name).is_file():
            return kind
    return "folder"


def check(source: str) -> None:
    """Refuses a path that is not there, before the seconds that a framework takes.

    Raises:
        ConfigError: no such data set, folder or file.
    """
    if source == "auto" or source in NAMES or Path(os.path.expanduser(source)).exists():
        return
    raise ConfigError(
        f"--data must be auto, {', '.join(NAMES)}, or a folder or file that exists on every node",
        f"{source}: no such file or folder",
        "correct --data, or train on --data digits, which are built in",
    )


def _in_memory(images: datasets.Images, recipe: str, *, pad: int, flip: bool) -> ImageData:
    """Colour pictures that are served from memory, shifted by up to `pad` pixels."""
    import hvdtrain.torch as hvt

    x, classes = images.x_train, int(max(images.y_train.max(), images.y_test.max())) + 1
    mean, std = by_channel(x)
    return ImageData(
        recipe=recipe,
        note=images.note,
        sha256=images.fingerprint(),
        classes=classes,
        image_size=x.shape[-1],
        train=(x, images.y_train),
        val=(images.x_test, images.y_test),
        samples=len(x),
        val_samples=len(images.x_test),
        augment=hvt.crop_flip(mean, std, pad=pad, flip=flip),
        val_augment=hvt.normalise(mean, std),
    )


def _folder(source: str, world: World, image_size: int, **settings: Any) -> ImageData:
    """Files that are decoded while training, by worker processes."""
    import hvdtrain.torch as hvt

    train, val = datasets.load_folder(source, world=world)
    if val is None:
        raise ConfigError(
            "training needs held-out pictures: a folder val beside train, with the same classes",
            f"no val in {os.path.abspath(source)}",
            "move some pictures of each class from train/CLASS to val/CLASS",
            shared=True,
        )
    return ImageData(
        recipe="imagenet",
        note=f"{train.note}; {len(val):,} held out",
        sha256=_fingerprint(train, val),
        classes=len(train.classes),
        image_size=image_size,
        train=hvt.ImageFiles(train, train=True, size=image_size, **settings),
        val=hvt.ImageFiles(val, train=False, size=image_size, **settings),
        samples=len(train),
        val_samples=len(val),
        augment=None,  # they bring their own
        val_augment=None,
        in_memory=False,
    )


def _fingerprint(*folders: datasets.Folder) -> str:
    """SHA-256 over classes, names and labels; contents are not read: that takes hours where there are a million."""
    digest = hashlib.sha256()
    for folder in folders:
        digest.update(repr((folder.classes, len(folder))).encode() + folder.files.tobytes() + folder.labels.tobytes())
    return digest.hexdigest()


def by_channel(pictures: np.ndarray) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel of uint8 `[N, C, H, W]`, of values from 0 to 1; a channel that is
    the same everywhere counts as having a deviation of 1."""
    import numpy as np

    means, stds = [], []
    for channel in range(pictures.shape[1]):
        counts = np.bincount(pictures[:, channel].reshape(-1), minlength=256)
        share, value = counts / counts.sum(), np.arange(256) / 255
        mean = float(share @ value)
        means.append(mean)
        variance = float(share @ (value - mean) ** 2)
        stds.append(variance**0.5 if variance > EVEN else 1.0)
    return means, stds
