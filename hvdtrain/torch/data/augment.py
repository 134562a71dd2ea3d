"""Augmentation of whole batches, on the device: what torchvision does image by image, with one operation a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hvdtrain.core.errors import ConfigError

# of all training pixels / 255, by channel
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Normalise:
    """The augmentation of `normalise`."""

    draws = 0

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        if len(mean) != len(std) or not all(value > 0 for value in std):
            raise ConfigError("mean and std must have one value per channel, std > 0", f"mean={mean}, std={std}")
        self.mean, self.std = tuple(mean), tuple(std)
        self._kept: dict[tuple[torch.device, float], tuple[Tensor, Tensor]] = {}

    def __call__(self, batch: Tensor, uniforms: Tensor) -> Tensor:
        if batch.ndim != 4 or batch.shape[1] != len(self.mean):
            raise ConfigError(
                f"images must have shape [n, {len(self.mean)}, height, width]",
                f"shape {tuple(batch.shape)}",
                "give one mean and std per channel; put channels first",
            )
        whole = batch.dtype == torch.uint8
        factor, offset = self._constants(batch.device, 1 / 255 if whole else 1.0)
        return batch.to(torch.float32).mul_(factor).add_(offset) if whole else batch.float() * factor + offset

    def _constants(self, device: torch.device, scale: float) -> tuple[Tensor, Tensor]:
        """Factor and offset by channel, kept: to send them to a GPU for every batch would wait for it every time."""
        if (device, scale) not in self._kept:
            values = (
                [scale / std for std in self.std],
                [-mean / std for mean, std in zip(self.mean, self.std, strict=True)],
            )
            factor, offset = (torch.tensor(its, dtype=torch.float32, device=device).view(1, -1, 1, 1) for its in values)
            self._kept[device, scale] = factor, offset
        return self._kept[device, scale]


class CropFlip(Normalise):
    """The augmentation of `crop_flip`: torchvision's `RandomCrop(size, padding=pad)` and `RandomHorizontalFlip()`."""

    draws = 3  # down, right, mirror

    def __init__(self, mean: Sequence[float], std: Sequence[float], *, pad: int = 4, flip: bool = True) -> None:
        super().__init__(mean, std)
        if pad < 0:
            raise ConfigError("pad must be >= 0 pixels", f"pad={pad}")
        self.pad, self.flip = pad, flip

    def __call__(self, batch: Tensor, uniforms: Tensor) -> Tensor:
        return super().__call__(self.move(batch, uniforms), uniforms)

    def move(self, batch: Tensor, uniforms: Tensor) -> Tensor:
        """Returns the images shifted and mirrored, of the type they came in."""
        on_cpu = batch.device.type == "cpu"
        if self.pad:
            shift = (uniforms[:, :2] * (2 * self.pad + 1)).long()
            batch = (_shifted_cpu if on_cpu else shifted)(batch, shift, self.pad)
        if self.flip:
            own = batch if self.pad else batch.clone()  # on CPU it is changed in place
            batch = (_mirrored_cpu if on_cpu else mirrored)(own, uniforms[:, 2] < 0.5)
        return batch


def shifted(batch: Tensor, shift: Tensor, pad: int) -> Tensor:
    """Returns the windows of the padded images that begin at `shift` (down, right), int64 [n, 2]; any device."""
    height, width = batch.shape[2:]
    windows = F.pad(batch, [pad] * 4).unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(len(batch), device=batch.device), :, shift[:, 0], shift[:, 1]]


def mirrored(batch: Tensor, mirror: Tensor) -> Tensor:
    """Returns the images, those left and right changed where `mirror`, bool [n]; any device."""
    return torch.where(mirror.view(-1, 1, 1, 1), batch.flip(3), batch)


def _shifted_cpu(batch: Tensor, shift: Tensor, pad: int) -> Tensor:
    """`shifted`, by numpy: it copies whole rows where PyTorch on CPU copies bytes one by one (half the time)."""
    samples, channels, height, width = batch.shape
    padded = np.zeros((samples, channels, height + 2 * pad, width + 2 * pad), batch.numpy().dtype)
    padded[:, :, pad : pad + height, pad : pad + width] = batch.numpy()
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
    down, right = shift.numpy().T
    return torch.from_numpy(windows[np.arange(samples), :, down, right])


def _mirrored_cpu(batch: Tensor, mirror: Tensor) -> Tensor:
    """`mirrored`, by numpy and in place: only the images that change are touched."""
    pictures, chosen = batch.numpy(), mirror.numpy().nonzero()[0]
    pictures[chosen] = pictures[chosen][..., ::-1]
    return batch


def normalise(mean: Sequence[float], std: Sequence[float]) -> Normalise:
    """Returns an `augment` that normalises images [n, C, H, W] to float32 `(x - mean) / std`, uint8 ones with x / 255.

    Example:
        train = hvt.loader((x, y), per_rank_batch=32, augment=hvt.normalise(hvt.CIFAR10_MEAN, hvt.CIFAR10_STD))

    Args:
        mean, std: one value per channel, of pixels from 0 to 1.
    """
    return Normalise(mean, std)


def crop_flip(mean: Sequence[float], std: Sequence[float], *, pad: int = 4, flip: bool = True) -> CropFlip:
    """Returns the standard augmentation of small images (Lee et al. 2015, He et al. 2016).

    It shifts each by up to `pad` pixels, mirrors half of them (unless `flip` is False), and normalises (`normalise`).

    Example:
        train = hvt.loader((x, y), per_rank_batch=32, augment=hvt.crop_flip(hvt.CIFAR10_MEAN, hvt.CIFAR10_STD))
    """
    return CropFlip(mean, std, pad=pad, flip=flip)
