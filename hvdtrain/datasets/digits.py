"""The embedded data set: 1,797 real handwritten digits, in the shape of MNIST.

Source: the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine
Learning Repository, 1998, https://doi.org/10.24432/C50P49, licence CC BY 4.0), in the copy that scikit-learn
ships as `sklearn.datasets.load_digits`. 43 people wrote the digits; NIST's programs cut them out of a form,
and each pixel counts the inked dots (0..16) of a 4x4 block of a 32x32 bitmap.

`digits.npz` beside this file holds them unchanged: `images` uint8 `[1797, 8, 8]`, `labels` uint8 `[1797]`.
"""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

SAMPLES, TEST_SAMPLES = 1797, 360
INK_LEVELS = 16  # pixels count inked dots: 0..16


def originals() -> tuple[np.ndarray, np.ndarray]:
    """Returns the pictures as published: uint8 `[1797, 8, 8]` with values 0..16, and uint8 labels `[1797]`."""
    import numpy as np

    with (
        resources.files(__package__).joinpath("digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as stored,
    ):
        return stored["images"], stored["labels"]


def load(size: int = 28) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns `x_train, y_train, x_test, y_test`: uint8 `[1437|360, size, size]` with values 0..255, and labels 0..9.

    The split never changes and needs no random numbers (whose streams may differ between numpy versions):
    the pictures are put in order of their digit, and every fifth is for testing. So a fifth of every digit's
    pictures, from all over the collection, is in the test set.
    """
    import numpy as np

    images, labels = originals()
    pictures = enlarge(images.astype(np.float64) * (255 / INK_LEVELS), size)
    for_test = np.zeros(len(labels), bool)
    for_test[np.argsort(labels, kind="stable")[::5]] = True
    return pictures[~for_test], labels[~for_test], pictures[for_test], labels[for_test]


def enlarge(images: np.ndarray, size: int) -> np.ndarray:
    """Scales square pictures `[N, S, S]` (0..255) bilinearly to uint8 `[N, size, size]`.

    Pixel centres lie half a pixel in, and the border repeats: the convention of OpenCV, of
    `torch.nn.functional.interpolate(align_corners=False)` and of `tf.image.resize`.
    """
    import numpy as np

    small = images.shape[-1]
    position = np.clip((np.arange(size) + 0.5) * small / size - 0.5, 0, small - 1)
    low = np.minimum(position.astype(np.int64), small - 2)
    weights = np.zeros((size, small))  # row i: how much each old pixel gives to new pixel i
    weights[np.arange(size), low] = 1 - (position - low)
    weights[np.arange(size), low + 1] = position - low
    # two products of one dimension each; + 0.5 and floor rounds the same way everywhere
    return np.floor(np.clip(weights @ images @ weights.T, 0, 255) + 0.5).astype(np.uint8)
