"""Image files as training samples, decoded as a viewer shows them; unreadable files are named."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from hvdtrain.core.errors import ConfigError
from hvdtrain.torch.data.augment import IMAGENET_MEAN, IMAGENET_STD, Normalise
from hvdtrain.torch.data.workers import Unreadable

# What PIL raises for files that are cut off, broken, or no images, and the system for files that are gone
UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)
JPEG_START = b"\xff\xd8\xff"
ORIENTATION = 0x0112  # in EXIF
# None in a torchvision that was built without libjpeg
_JPEG = decode_jpeg if hasattr(torch.ops.image, "decode_jpeg") else None


class Files(Protocol):
    """A list of labelled image files; `hvdtrain.datasets.Folder` is one."""

    @property
    def labels(self) -> Any: ...
    @property
    def classes(self) -> tuple[str, ...]: ...
    def path(self, index: int) -> str: ...


class ImageFiles(torch.utils.data.Dataset[Any]):
    """A data set of samples `(uint8 [3, size, size], label)`; the loader normalises whole batches with `augment`.

    For training: a random part of 8 % to 100 % of the area, scaled to `size`, mirrored or not (Szegedy et al. 2015).
    Otherwise: the shorter side scaled to `resize`, and the centre.

    Grey, palette and CMYK images become RGB. Images of a turned camera (EXIF) are turned back.

    Example:
        files, validation_files = load_folder("imagenet")
        train = hvt.loader(hvt.ImageFiles(files, train=True), per_rank_batch=32)

    Args:
        files: for example `hvdtrain.datasets.load_folder(path)[0]`.
        train: True for random parts, False for the centre.
        size: height and width of the samples, in pixels.
        resize: length of the shorter side, in pixels, before the centre is cut; default: size · 256 / 224.
        strict: True raises an error for a file that cannot be read; False skips, names and counts it.
        transform: replaces crops and scaling: a function of a uint8 picture [3, H, W], for example one of
            `torchvision.transforms.v2`. Its random numbers depend only on the sample's place in the epoch.
        augment: the loader's operation on whole batches; default: normalises by ImageNet's mean and deviation.
    """

    def __init__(
        self,
        files: Files,
        *,
        train: bool,
        size: int = 224,
        resize: int | None = None,
        strict: bool = False,
        transform: Callable[[Tensor], Tensor] | None = None,
        augment: Any = None,
    ) -> None:
        resize = resize or size * 256 // 224
        if size < 1 or resize < size:
            raise ConfigError("size must be >= 1, resize (the shorter side) >= size", f"size={size}, resize={resize}")
        self.files = files
        self.strict = strict
        crops = [v2.Resize(resize, antialias=True), v2.CenterCrop(size)]
        if train:
            crops = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
        self.transform = transform or v2.Compose(crops)
        self.augment = augment or Normalise(IMAGENET_MEAN, IMAGENET_STD)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.files.classes

    def __len__(self) -> int:
        return len(self.files.labels)

    def __getitem__(self, index: int) -> Any:
        path = self.files.path(index)
        try:
            image = Picture(path).decode()
        except UNREADABLE as error:
            return Unreadable(path, _reason(error, path), fatal=self.strict)
        return self.transform(image), int(self.files.labels[index])


def _reason(error: Exception, path: str) -> str:
    """Returns one line that does not repeat the file's name, and that is the same in every process."""
    if isinstance(error, UnidentifiedImageError):  # its text has the address of a buffer
        return "UnidentifiedImageError: not a picture of any known format"
    return f"{type(error).__name__}: {error}".replace(repr(path), "it")


class Picture:
    """The picture of a file; raises one of `UNREADABLE`."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self._data = file.read()
        with warnings.catch_warnings():
            # broken EXIF data and odd palettes: the pixels are what counts, and they are there or not
            warnings.simplefilter("ignore")
            self._image = Image.open(io.BytesIO(self._data))
            turned = 1
            with suppress(*UNREADABLE):
                turned = self._image.getexif().get(ORIENTATION, 1)
        self._is_turned = turned in range(2, 9)

    def decode(self) -> Tensor:
        """Returns uint8 [3, H, W], upright. torchvision decodes JPEGs, without a copy or two; pillow the others, to
        the same pixels."""
        if _JPEG is not None and not self._is_turned and self._data.startswith(JPEG_START):
            buffer = torch.frombuffer(bytearray(self._data), dtype=torch.uint8)
            with suppress(RuntimeError):  # a kind of JPEG that it does not know (CMYK, in some versions), or broken
                return _JPEG(buffer, ImageReadMode.RGB)
        return self.decode_by_pillow()

    def decode_by_pillow(self) -> Tensor:
        """`decode`, for every format there is."""
        with warnings.catch_warnings(), self._image:
            warnings.simplefilter("ignore")
            image: Image.Image = ImageOps.exif_transpose(self._image) if self._is_turned else self._image
            if image.mode in ("P", "LA", "PA"):  # transparency in a palette: RGB of it is by way of RGBA
                image = image.convert("RGBA")
            return _tensor(image.convert("RGB"))


def _tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
