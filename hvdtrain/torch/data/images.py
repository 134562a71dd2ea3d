"""Image files as training samples, decoded as a viewer shows them, whatever they are; the unreadable are named."""

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
    """A data set of `(uint8 [3, size, size], label)`; the loader normalises whole batches with `augment`.

    For training: a random part of 8 % to 100 % of the area, scaled to the size, mirrored or not (Szegedy et al. 2015).
    Else: the shorter side scaled to `resize`, and the centre.

    Grey, palette and CMYK images become RGB, and images that were taken with a turned camera (EXIF) are turned back.
    A file that cannot be read is left out, named and counted by the loader, or refused.

    Args:
        files: for example `hvdtrain.datasets.load_folder(path)[0]`.
        train: random parts, or the centre.
        size: height and width of the samples, in pixels.
        resize: for the centre: of the shorter side before it is cut; by default size · 256 / 224.
        strict: a file that cannot be read is an error.
        transform: takes the place of crops and scaling: of a uint8 picture [3, H, W], for example by
            `torchvision.transforms.v2`; its random numbers depend on the sample's place in the epoch only.
        augment: what the loader does to whole batches; by default it normalises by ImageNet's mean and deviation.
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
            raise ConfigError("size >= 1, and the shorter side is not scaled below it", f"size={size}, resize={resize}")
        self.files = files
        self.strict = strict
        if train:
            own = v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()])
        else:
            own = v2.Compose([v2.Resize(resize, antialias=True), v2.CenterCrop(size)])
        self.transform = transform or own
        self.augment = augment or Normalise(IMAGENET_MEAN, IMAGENET_STD)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.files.classes

    def __len__(self) -> int:
        return len(self.files.labels)

    def __getitem__(self, index: int) -> Any:
        path = self.files.path(index)
        try:
            image = decode(path)
        except UNREADABLE as error:
            return Unreadable(path, _reason(error, path), fatal=self.strict)
        return self.transform(image), int(self.files.labels[index])


def _reason(error: Exception, path: str) -> str:
    """One line that does not name the file again, and is the same in every process."""
    if isinstance(error, UnidentifiedImageError):  # its text has the address of a buffer
        return "UnidentifiedImageError: not a picture of any known format"
    return f"{type(error).__name__}: {error}".replace(repr(path), "it")


def decode(path: str) -> Tensor:
    """Returns the picture in RGB, upright: uint8 [3, H, W].

    JPEGs are decoded by torchvision, which saves a copy or two; pillow does what torchvision cannot, and gives the same
    pixels, as both use libjpeg.

    Raises:
        OSError, ValueError, ...: one of `UNREADABLE`.
    """
    with open(path, "rb") as file:
        data = file.read()
    if _JPEG is not None and data.startswith(JPEG_START):
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with suppress(RuntimeError):  # a kind of JPEG that it does not know (CMYK, in some versions), or broken
            return _JPEG(buffer, ImageReadMode.RGB, apply_exif_orientation=True)
    return decode_by_pillow(data)


def decode_by_pillow(data: bytes) -> Tensor:
    """`decode`, of a whole file's bytes, for every format there is."""
    with warnings.catch_warnings():
        # broken EXIF data and odd palettes: the pixels are what counts, and they are there or not
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data)) as image:
            upright = ImageOps.exif_transpose(image)
            if upright.mode in ("P", "LA", "PA"):  # transparency in a palette: RGB of it is by way of RGBA
                upright = upright.convert("RGBA")
            picture = np.array(upright.convert("RGB"))
    return torch.from_numpy(picture).permute(2, 0, 1).contiguous()
