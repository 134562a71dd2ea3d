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
from torchvision.transforms.v2 import functional as F

from hvdtrain.core.errors import ConfigError
from hvdtrain.torch.data.augment import IMAGENET_MEAN, IMAGENET_STD, Normalise
from hvdtrain.torch.data.workers import Unreadable

# What PIL raises for files that are cut off, broken, or no images, and the system for files that are gone
UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)
JPEG_START = b"\xff\xd8\xff"
ORIENTATION = 0x0112  # in EXIF; from 5 on, height and width change places
REDUCTIONS = (8, 4, 2)  # that libjpeg's inverse transform has for nothing
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

    libjpeg decodes a JPEG that has at least twice the needed pixels per side at a half, a quarter or an eighth of them.
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
        reduced: False decodes every JPEG at all its pixels, as always with a `transform`.
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
        reduced: bool = True,
    ) -> None:
        resize = resize or size * 256 // 224
        if size < 1 or resize < size:
            raise ConfigError("size must be >= 1, resize (the shorter side) >= size", f"size={size}, resize={resize}")
        self.files = files
        self.strict = strict
        self.reduced = reduced
        self.transform = transform
        self._part = _RandomPart(size) if train else _Centre(size, resize)
        self.augment = augment or Normalise(IMAGENET_MEAN, IMAGENET_STD)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.files.classes

    def __len__(self) -> int:
        return len(self.files.labels)

    def __getitem__(self, index: int) -> Any:
        path = self.files.path(index)
        try:
            picture = Picture(path)
            image = picture.decode() if self.transform else self._part(picture, self.reduced)
        except UNREADABLE as error:
            return Unreadable(path, _reason(error, path), fatal=self.strict)
        return self.transform(image) if self.transform else image, int(self.files.labels[index])


class _RandomPart:
    """A random part of a picture, mirrored or not."""

    def __init__(self, size: int) -> None:
        self.size, self._crop, self._flip = size, v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()

    def __call__(self, picture: Picture, reduced: bool) -> Tensor:
        part = self._crop.make_params([torch.empty((3, *picture.size), device="meta")])
        by = reduction(min(part["height"], part["width"]), self.size) if reduced else 1
        if by > 1:
            return self._flip(picture.decode_part(**part, size=self.size, reduction=by))
        return self._flip(F.resized_crop(picture.decode(), **part, size=[self.size, self.size], antialias=True))


class _Centre:
    """The centre of a picture whose shorter side is scaled."""

    def __init__(self, size: int, resize: int) -> None:
        self.size, self.resize = size, resize
        self._transform = v2.Compose([v2.Resize(resize, antialias=True), v2.CenterCrop(size)])

    def __call__(self, picture: Picture, reduced: bool) -> Tensor:
        by = reduction(min(picture.size), self.resize) if reduced else 1
        if by == 1:
            return self._transform(picture.decode())
        scaled = [int(self.resize * side / min(picture.size)) for side in picture.size]  # and cut out, as v2 does it
        top, left = (
            round((side - self.size) / 2) * whole / side for side, whole in zip(scaled, picture.size, strict=True)
        )
        height, width = (self.size * whole / side for side, whole in zip(scaled, picture.size, strict=True))
        return picture.decode_part(top=top, left=left, height=height, width=width, size=self.size, reduction=by)


def reduction(pixels: int, needed: int) -> int:
    """1, 2, 4 or 8: the largest at which so many pixels are still the needed ones."""
    return next((its for its in REDUCTIONS if pixels >= its * needed), 1)


def _reason(error: Exception, path: str) -> str:
    """Returns one line that does not repeat the file's name, and that is the same in every process."""
    if isinstance(error, UnidentifiedImageError):  # its text has the address of a buffer
        return "UnidentifiedImageError: not a picture of any known format"
    return f"{type(error).__name__}: {error}".replace(repr(path), "it")


class Picture:
    """The picture of a file, of known `size` (height and width, upright, in pixels); raises one of `UNREADABLE`."""

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
        self._turned = turned if turned in range(2, 9) else 1
        width, height = self._image.size
        self.size = (width, height) if self._turned >= 5 else (height, width)

    def decode(self, reduction: int = 1) -> Tensor:
        """Returns uint8 [3, H, W]; a JPEG with a `reduction` of 2, 4 or 8 has that fraction of the pixels per side,
        rounded up. torchvision decodes JPEGs, without a copy or two; pillow the others, to the same pixels."""
        if _JPEG is not None and reduction == 1 and self._turned == 1 and self._data.startswith(JPEG_START):
            buffer = torch.frombuffer(bytearray(self._data), dtype=torch.uint8)
            with suppress(RuntimeError):  # a kind of JPEG that it does not know (CMYK, in some versions), or broken
                return _JPEG(buffer, ImageReadMode.RGB)
        return self.decode_by_pillow(reduction)

    def decode_by_pillow(self, reduction: int = 1) -> Tensor:
        """`decode`, for every format there is."""
        with self._image:
            return _tensor(self._upright(reduction))

    def decode_part(self, *, top: float, left: float, height: float, width: float, size: int, reduction: int) -> Tensor:
        """Returns a part of the upright picture, given by its pixels, scaled: uint8 [3, size, size]."""
        with self._image:
            image = self._upright(reduction)
            by = reduction if image.size != self.size[::-1] else 1  # no JPEG
            # The last row and column are filled up to a whole pixel; they are the first where the picture was turned
            right = image.width - self.size[1] / by if self._turned in (2, 3, 6, 7) else 0
            down = image.height - self.size[0] / by if self._turned in (3, 4, 7, 8) else 0
            start, first = left / by + right, top / by + down
            end, last = min(start + width / by, image.width), min(first + height / by, image.height)
            return _tensor(image.resize((size, size), Image.Resampling.BILINEAR, (start, first, end, last)))

    def _upright(self, reduction: int) -> Image.Image:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image: Image.Image = self._image
            if reduction > 1:
                image.draft(None, (image.width // reduction, image.height // reduction))
            if self._turned > 1:
                image = ImageOps.exif_transpose(image)
            if image.mode in ("P", "LA", "PA"):  # transparency in a palette: RGB of it is by way of RGBA
                image = image.convert("RGBA")
            return image.convert("RGB")


def _tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
