"""A `PyDataset` of image files, as Keras' documentation writes one, for `hvdtrain bench input --framework keras`."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

if TYPE_CHECKING:
    from hvdtrain.datasets.folder import Folder


class JpegBatches(keras.utils.PyDataset):
    """Batches of JPEGs: decoded, cropped at random, enlarged to `size`, mirrored; float32 [batch, size, size, 3]."""

    def __init__(self, folder: Folder, batch: int, size: int, repeats: int = 1000, **settings: Any) -> None:
        super().__init__(**settings)
        self.folder, self.batch, self.size, self.repeats = folder, min(batch, len(folder)), size, repeats

    def __len__(self) -> int:
        return len(self.folder) // self.batch * self.repeats

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        numbers = [(index * self.batch + number) % len(self.folder) for number in range(self.batch)]
        pictures = np.stack([self.picture(self.folder.path(number)) for number in numbers])
        return pictures, np.asarray(self.folder.labels)[numbers]

    def picture(self, path: str) -> np.ndarray:
        """Returns one file's picture as [size, size, 3] in 0..1, randomly cropped and mirrored."""
        from PIL import Image

        with Image.open(path) as image:
            side = min(image.size)
            left, top = (random.randint(0, length - side) for length in image.size)
            picture = image.convert("RGB").resize((self.size, self.size), box=(left, top, left + side, top + side))
        if random.random() < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(picture, np.float32) / 255
