"""Augmentation, decoding and evaluation in one process. Prints which cases passed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from loader_alone import Numbers, acted, refused
from passing import run_all
from pictures import CORRUPT, write_folder
from PIL import Image, ImageOps
from torch import Tensor, nn
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

import hvdtrain.torch as hvt
from hvdtrain.datasets import load_folder
from hvdtrain.torch.data import augment, images
from hvdtrain.torch.values.clock import CLOCK
from hvdtrain.world.world import World

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.1)


def small_pictures(count: int = 40) -> Tensor:
    return torch.randint(0, 256, (count, 3, 12, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def case_crop_flip_is_torchvisions_image_by_image() -> None:
    pictures = small_pictures()
    uniforms = torch.rand(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ours = hvt.crop_flip(MEAN, STD, pad=2)(pictures, uniforms)
    moved = 0
    for picture, (down, right, mirror), got in zip(pictures, uniforms.tolist(), ours, strict=True):
        one = TF.crop(TF.pad(picture, [2]), int(down * 5), int(right * 5), 12, 10)
        one = TF.horizontal_flip(one) if mirror < 0.5 else one
        assert torch.allclose(TF.normalize(TF.to_dtype(one, torch.float32, scale=True), MEAN, STD), got, atol=1e-5)
        moved += not torch.equal(one, picture)
    assert moved > 30  # else the comparison showed nothing
    assert torch.equal(ours, hvt.crop_flip(MEAN, STD, pad=2)(pictures, uniforms))


def case_crop_flip_goes_everywhere() -> None:
    dot = torch.zeros(4000, 1, 9, 9, dtype=torch.uint8)
    dot[:, :, 4, 4] = 255
    moved = hvt.crop_flip((0.0,), (1.0,), pad=4, flip=False)(dot, torch.rand(4000, 3, dtype=torch.float64))
    assert (moved.sum(0)[0] > 20).all() and moved.sum() == 4000  # about 49 in each of 81 places
    still = hvt.crop_flip((0.0,), (1.0,), pad=0, flip=False)(dot, torch.rand(4000, 3, dtype=torch.float64))
    assert torch.equal(still, dot / 255)


def case_ways_to_move_are_equal() -> None:
    pictures = small_pictures()
    shift = torch.randint(0, 7, (40, 2))
    assert torch.equal(augment.shifted(pictures, shift, 3), augment._shifted_cpu(pictures, shift, 3))
    mirror = torch.rand(40) < 0.5
    assert torch.equal(augment.mirrored(pictures, mirror), augment._mirrored_cpu(pictures.clone(), mirror))
    before = pictures.clone()
    hvt.crop_flip(MEAN, STD, pad=0)(pictures, torch.zeros(40, 3, dtype=torch.float64))
    assert torch.equal(pictures, before)  # the caller's pictures stay


def case_normalise() -> None:
    pictures, nothing = small_pictures(), torch.empty(40, 0)
    expected = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])(pictures)
    assert torch.allclose(hvt.normalise(MEAN, STD)(pictures, nothing), expected, atol=1e-5)
    floats = pictures / 255
    assert torch.allclose(hvt.normalise(MEAN, STD)(floats, nothing), expected, atol=1e-5)
    assert torch.equal(floats, pictures / 255)  # not changed in place
    refused(lambda: hvt.normalise(MEAN, STD)(pictures[:, :1], nothing), "(40, 1, 12, 10)")
    refused(lambda: hvt.normalise(MEAN, (0.2, 0.3, 0.0)), "std > 0")
    refused(lambda: hvt.normalise(MEAN, (0.2, 0.3)), "one value per channel")
    refused(lambda: hvt.crop_flip(MEAN, STD, pad=-1), "pad=-1")


def case_files_of_all_kinds_are_decoded(folder: Path) -> None:
    ant = write_folder(folder) / "train" / "ant"
    for decode in (images.Picture.decode, images.Picture.decode_by_pillow):
        decoded_right(ant, lambda name, decode=decode: decode(images.Picture(str(ant / name))).permute(1, 2, 0).numpy())
    assert images._JPEG is not None  # else both ways were the same


def decoded_right(ant: Path, decode: Any) -> None:
    with Image.open(ant / "0.jpg") as image:
        assert np.array_equal(decode("0.jpg"), np.asarray(image)) and image.size == (32, 24)
    grey = decode("1.jpg")
    assert grey.shape == (24, 32, 3) and (grey.std(axis=2) == 0).all() and grey[0, 0, 0] < 10 < 240 < grey[-1, -1, 0]
    with Image.open(ant / "2.jpg") as image:
        assert image.mode == "CMYK"
    colour = decode("2.jpg").reshape(-1, 3).mean(0)
    assert np.abs(colour - (200, 30, 60)).max() < 10, colour
    palette = decode("3.png")
    assert palette.shape == (24, 32, 3) and palette[0, 0].max() < 10 and palette[-1, -1].min() > 240
    with Image.open(ant / "4.jpg") as image:
        assert image.size == (32, 24) and np.asarray(image)[:, 0, 0].min() > 200  # the negative twin: red on the left
        upright = np.asarray(ImageOps.exif_transpose(image))
    turned = decode("4.jpg")
    assert turned.shape == (32, 24, 3) and np.array_equal(turned, upright)
    assert turned[0, :, 0].min() > 200 and turned[-1, :, 0].max() < 50  # red on top


def case_image_files(folder: Path) -> None:
    train, val = load_folder(write_folder(folder))
    files = hvt.ImageFiles(train, train=False, size=16, resize=20)
    assert len(files) == 18 and files.classes == ("ant", "bee", "cat") and val is not None and len(val) == 6
    picture, label = files[0]
    with Image.open(folder / "train" / "ant" / "0.jpg") as image:
        expected = v2.Compose([v2.Resize(20), v2.CenterCrop(16), v2.PILToTensor()])(image)
    assert label == 0 and picture.dtype == torch.uint8
    assert (picture.int() - expected.int()).abs().max() <= 1  # pillow rounds a scaled pixel in another way
    bad = [files[i] for i in range(18) if isinstance(files[i], hvt.Unreadable)]
    assert len(bad) == 1 and bad[0].name.endswith(CORRUPT) and not bad[0].fatal
    half = folder / "train" / "cat" / "0.jpg"
    half.write_bytes(half.read_bytes()[: half.stat().st_size // 2])  # cut off
    (folder / "train" / "cat" / "1.jpg").unlink()
    reasons = {Path(i.name).name: i.reason for i in (files[i] for i in range(18)) if isinstance(i, hvt.Unreadable)}
    assert "truncated" in reasons["0.jpg"] and "FileNotFoundError" in reasons["1.jpg"], reasons
    torch.manual_seed(0)
    parts = [hvt.ImageFiles(train, train=True, size=16)[0][0] for _ in range(2)]
    assert parts[0].shape == (3, 16, 16) and not torch.equal(*parts)
    own = hvt.ImageFiles(train, train=True, transform=lambda image: torch.tensor(image.shape), augment=None)
    assert own[0][0].tolist() == [3, 24, 32]
    refused(lambda: hvt.ImageFiles(train, train=False, size=32, resize=16), "size=32, resize=16")


def smooth_jpeg(path: Path, size: tuple[int, int], **options: Any) -> Path:
    """A picture whose neighbours are alike, as a photograph's are, and whose corners are not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.Generator(np.random.PCG64(7)).integers(0, 256, (9, 12, 3), np.uint8)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(path, quality=95, **options)
    return path


def case_broken_exif_is_no_broken_picture(folder: Path) -> None:
    path = smooth_jpeg(folder / "a" / "0.jpg", (64, 48), exif=b"Exif\0\0II*\0\xff\xff\xff\x7f")
    for decode in (images.Picture.decode, images.Picture.decode_by_pillow):
        assert decode(images.Picture(str(path))).shape == (3, 48, 64)


def case_class_scores() -> None:
    draw = torch.Generator().manual_seed(3)
    outputs, targets = torch.randn(200, 9, generator=draw), torch.randint(0, 9, (200,), generator=draw)
    values = hvt.classification(top=(1, 3, 20), label_smoothing=0.1)(outputs, targets)
    for k in (1, 3):
        assert torch.equal(values[f"top{k}"], (outputs.topk(k).indices == targets[:, None]).any(1))
    assert values["top20"].all() and 20 < values["top3"].sum() < 180
    assert torch.equal(values["loss"], F.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1))
    same = hvt.classification(top=(1, 2))(torch.zeros(4, 3), torch.tensor([0, 1, 2, 0]))
    assert same["top1"].tolist() == [True, False, False, True]  # as argmax does; not all of them
    assert same["top2"].tolist() == [True, True, False, True]
    lost = hvt.classification(top=(1,))(torch.full((3, 4), math.nan), torch.tensor([0, 1, 3]))
    assert not lost["top1"].any() and lost["loss"].isnan().all()
    part = torch.tensor([[math.nan, 1.0, 0.0]])
    assert not hvt.classification(top=(1,))(part, torch.tensor([1]))["top1"].any()
    assert values["loss"].dtype == torch.float32
    assert hvt.classification()(outputs.double(), targets)["loss"].dtype == torch.float64
    refused(lambda: hvt.classification(top=(0,)), "top=(0,)")


def numbers(samples: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(samples, dtype=np.float32)[:, None], np.arange(samples)


def error_of(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"error": outputs[:, 0].double() - targets, "ones": torch.ones(len(targets))}


def case_evaluation_refuses() -> None:
    net, world = nn.Linear(1, 1), World.solo()

    def run(data: Any = None, metrics: Any = error_of, **options: Any) -> Any:
        data = numbers(5) if data is None else data
        return hvt.evaluate(net, data, metrics, **{"per_rank_batch": 2, "world": world, **options})

    refused(lambda: run(metrics=lambda outputs, targets: {"loss": outputs.mean()}), "loss: () for 2 samples")
    refused(lambda: run(metrics=lambda outputs, targets: {"loss": 0.5}), "loss: float")
    for metrics in (lambda outputs, targets: None, lambda outputs, targets: outputs[:, 0]):
        refused(lambda metrics=metrics: run(metrics=metrics), "must return a dict")
    scores = torch.rand(5, 3)
    for targets, said in (
        (torch.rand(5, 3), "targets (2, 3) torch.float32"),
        (torch.ones(5, 1, dtype=torch.int64), "targets.squeeze(1)"),
        (torch.tensor([0, -100, 1, 2, 0]), "targets from -100 to 0, scores of 3 classes"),
        (torch.tensor([0, 3, 1, 2, 0]), "remove samples that do not count"),
    ):
        shown = lambda t=targets: hvt.evaluate(  # noqa: E731
            nn.Identity(), (scores, t), hvt.classification(top=(1,)), per_rank_batch=2, world=world
        )
        refused(shown, said)
    refused(lambda: run(data=numbers(5)[0]), "a Tensor")
    refused(lambda: run(data=numbers(5)[:1]), "a tuple of 1")
    refused(lambda: run(per_rank_batch=None), "per_rank_batch")
    refused(lambda: run(data=numbers(0)), "samples")
    refused(lambda: run(data=Numbers(3, (0, 1, 2)), workers=0), "none of 3")
    dropping = hvt.loader(numbers(5), 2, world=world, tail="drop")
    refused(lambda: run(data=dropping), "drop")
    net.train()
    refused(lambda: run(metrics=lambda outputs, targets: 1 / 0), kind=ZeroDivisionError)
    assert net.training and torch.is_grad_enabled() and CLOCK.phase == "other"


def case_evaluation_leaves_training_alone() -> None:
    net = nn.Linear(1, 1)
    nn.init.ones_(net.weight)
    nn.init.zeros_(net.bias)
    train = hvt.loader(numbers(10), 3, world=World.solo(seed=4), augment=None)
    batches = iter(train)
    first = next(batches)[1].tolist()
    step, position = train.step, train.position
    assert hvt.evaluate(net, train, error_of, world=World.solo()) == {"error": 0.0, "ones": 1.0}
    assert train.step is step and train.position == position and CLOCK.phase == "forward"
    rest = [value for _, labels in batches for value in labels.tolist()]
    assert sorted(first + rest) == list(range(10)) and net.training
    assert CLOCK.take()["evaluation"] > 0


def case_evaluation_counts_readable_samples() -> None:
    net = nn.Linear(1, 1)

    class Rows(Numbers):
        def __getitem__(self, index: int) -> Any:
            row = super().__getitem__(index)
            return row if isinstance(row, hvt.Unreadable) else (row[0][None], row[1])

    def label(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"label": targets.double()}

    scores = hvt.evaluate(net, Rows(10, (0, 1, 2, 9)), label, per_rank_batch=3, workers=0, world=World.solo())
    assert scores == {"label": (3 + 4 + 5 + 6 + 7 + 8) / 6}


def case_workers_fit_the_cores() -> None:
    auto = hvt.loader(Numbers(4), 2, world=acted(0, 2))
    assert 0 <= auto.workers <= 16 and hvt.loader(Numbers(4), 2, world=acted(0, 2), workers=3).workers == 3


if __name__ == "__main__":
    run_all(globals())
