"""Pictures in memory: ranks load the same pictures, or all raise; and messages about broken files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hvdtrain.core.errors import ConfigError, HvdtrainError
from hvdtrain.world.world import World

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Images:
    """Pictures for training and testing.

    Attributes:
        name: "mnist", "digits", "cifar10", "synthetic".
        x_train, x_test: uint8 `[N, H, W]` (0 paper, 255 ink) or, in colour, `[N, 3, H, W]`.
        y_train, y_test: uint8 `[N]` (int64 where there are more than 256 classes), counted from 0.
        note: one line that describes the pictures and their source.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    note: str

    def fingerprint(self) -> str:
        """Returns the SHA-256 (hex) of all pictures and labels: equal if ranks hold the same data."""
        digest = hashlib.sha256()
        for array in (self.x_train, self.y_train, self.x_test, self.y_test):
            digest.update(repr(array.shape).encode())
            digest.update(array.tobytes())
        return digest.hexdigest()


def as_rgb(images: Images, size: int = 32) -> Images:
    """Returns grey square pictures `[N, S, S]` as `[N, 3, size, size]` for networks that take colour.

    Adds a black border (from MNIST's 28 to 32); never makes pictures smaller.

    Example:
        images = as_rgb(load_mnist(), size=32)

    Raises:
        ConfigError: the pictures are not grey and square, or larger than `size`.
    """
    import numpy as np

    def change(pictures: np.ndarray) -> np.ndarray:
        border = size - pictures.shape[-1]
        if pictures.ndim != 3 or pictures.shape[1] != pictures.shape[2] or border < 0 or pictures.dtype != np.uint8:
            received = f"{images.name}: {pictures.dtype} {list(pictures.shape)}, size={size}"
            raise ConfigError("pictures must be uint8 [N, S, S], S <= size, to become [N, 3, size, size]", received)
        before = border // 2
        framed = np.pad(pictures, ((0, 0), (before, border - before), (before, border - before)))
        return np.repeat(framed[:, None], 3, axis=1)

    return replace(images, x_train=change(images.x_train), x_test=change(images.x_test))


def synthetic(samples: int = 1280, *, classes: int = 1000, size: int = 224, seed: int = 0) -> Images:
    """Returns random colour pictures, the same on every machine for the same arguments.

    Each of the `classes` has its own tint, so that the loss can fall; labels repeat 0, 1, 2 ... in turn. A tenth of the
    samples (at least one) is for testing. `size`: height and width in pixels; `seed`: of the noise.

    Example:
        images = synthetic(1280, classes=10, size=32)

    Raises:
        ConfigError: there are fewer than two samples, no class or no pixel.
    """
    import numpy as np

    if samples < 2 or classes < 1 or size < 1:
        received = f"samples={samples}, classes={classes}, size={size}"
        raise ConfigError("synthetic data needs samples >= 2, classes >= 1 and size >= 1", received)
    pixels = samples * 3 * size * size
    words = np.random.Philox(key=np.array([seed, 0], np.uint64)).random_raw(-(-pixels // 8))
    noise = words.view(np.uint8)[:pixels].reshape(samples, 3, size, size)
    labels = np.arange(samples) % classes
    tint = np.random.Philox(key=np.array([seed, 1], np.uint64)).random_raw(classes * 3).reshape(classes, 3)
    # half of the range is noise, half the tint: they add up to 255 at most
    pictures = (noise >> 1) + (tint[labels] >> np.uint64(57)).astype(np.uint8)[:, :, None, None]
    labels = labels.astype(np.uint8 if classes <= 256 else np.int64)
    test = max(1, samples // 10)
    x_train, x_test, y_train, y_test = pictures[test:], pictures[:test], labels[test:], labels[:test]
    note = f"synthetic: {count_of(x_train, x_test)} random pictures of {classes} classes, {size}x{size}"
    return Images("synthetic", x_train, y_train, x_test, y_test, note)


def load_same(world: World, load: Callable[[], Images]) -> Images:
    """Runs `load` on every rank, and refuses ranks that hold different data; collective."""
    kept: list[Images] = []
    together(world, lambda: kept.append(load()))  # too big to be sent around
    world.agree("training data (SHA-256 of pictures and labels)", kept[0].fingerprint())
    return kept[0]


def together(world: World, work: Callable[[], T]) -> list[T]:
    """Runs `work` on every rank; returns all results, in rank order. A failure on one is raised on all."""
    try:
        outcome: tuple[T | None, tuple[str, str, str] | None] = (work(), None)
    except HvdtrainError as error:
        outcome = (None, (error.rule, error.received, error.remedy))
    except Exception as error:  # a bug of ours: no rank is left waiting for it either
        outcome = (None, (f"{type(error).__name__} while loading the data: {error}", "", ""))
    outcomes = world.gather(outcome)
    failed = {rank: failure for rank, (_, failure) in enumerate(outcomes) if failure is not None}
    if failed:
        rank, (rule, received, remedy) = next(iter(failed.items()))
        if len(failed) < world.size:
            received = f"on rank {', '.join(map(str, failed))} of {world.size}: {received}"
        raise ConfigError(rule, received, remedy, shared=True)
    return [result for result, _ in outcomes]  # type: ignore[misc]


def unusable(file: Path, error: Exception) -> ConfigError:
    """The error for a file of pictures that is missing, damaged, or something else."""
    remedy = "correct the path, put a good copy there, or train on --data digits, which are built in"
    return ConfigError(f"pictures cannot be read from {file}", f"{type(error).__name__}: {error}", remedy)


def count_of(x_train: np.ndarray, x_test: np.ndarray) -> str:
    """Returns the part of a note that counts the pictures."""
    return f"{len(x_train):,} training and {len(x_test):,} test"
