"""Made-up pictures: for measuring, and for trying a program where there is no data."""

from __future__ import annotations

from hvdtrain.core.errors import ConfigError
from hvdtrain.datasets.images import Images, count_of


def synthetic(samples: int = 1280, *, classes: int = 1000, size: int = 224, seed: int = 0) -> Images:
    """Returns random colour pictures, the same on every machine for the same arguments.

    Each class has a tint of its own, so that training has something to learn and the loss falls. A tenth (one sample at
    least) is for testing.

    Args:
        samples: all of them.
        classes: labels go round, so each has as many samples as any other.
        size: height and width in pixels.
        seed: of the noise.
    """
    import numpy as np

    if samples < 2 or classes < 1 or size < 1:
        received = f"samples={samples}, classes={classes}, size={size}"
        raise ConfigError("synthetic data has samples >= 2, classes >= 1 and size >= 1", received)
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
