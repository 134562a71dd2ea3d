"""How many images a second reach the training loop, ours against a plain PyTorch DataLoader, in rounds that take turns.

1. CIFAR-shaped pictures in memory: served in whole batches, against torchvision's transforms image by image.
2. A folder of JPEGs (your own with --data, else made up): the same transforms, by workers.

On a GPU the DataLoader also runs without pinned memory.

Prints tables with a recommendation, and writes a JSON file with every sample. Give the machine nothing else to do; with
--cores 1 everything runs on one core.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.bench.turns.turns import begin, finish, measured_on, progress
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.flags import whole
from hvdtrain.record import stats

if TYPE_CHECKING:
    import numpy as np

    from hvdtrain.datasets.folder import Folder
    from hvdtrain.world.world import World

MEMORY_IMAGES, MADE_UP_FILES, MADE_UP_SIZE = 10_000, 256, (500, 375)  # the size: ImageNet's average

GOOD_ENOUGH = 0.95  # of the best rate: fewer workers for nearly the same
# a variant: starts to read, returns its batches and what ends it
Start = Callable[[], tuple[Iterator[Any], Callable[[], None]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain bench input`."""
    count = whole(1)
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder of images, one folder a class, or one with train/ (default: made-up images)",
    )
    size = "of made-up files (default: 500 375, ImageNet's average)"
    add("--picture-size", type=count, nargs=2, default=MADE_UP_SIZE, metavar=("W", "H"), help=size)
    add("--workers", type=whole(0), nargs="+", default=[0, 2, 4, 8], metavar="N", help="(default: 0 2 4 8)")
    add(
        "--per-rank-batch",
        type=count,
        default=128,
        metavar="N",
        help="images in a batch in memory; of files a quarter (default: 128)",
    )
    add(
        "--image-size",
        type=count,
        default=224,
        metavar="N",
        help="side in pixels after the crop, for files (default: %(default)s)",
    )
    add("--seconds", type=float, default=2.0, metavar="S", help="seconds of a block (default: %(default)s)")
    add("--rounds", type=count, default=3, metavar="N", help="blocks of each variant (default: %(default)s)")
    add("--cores", type=count, metavar="N", help="cores to use (default: all that this process may use)")
    add(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="device that gets the batches (default: %(default)s)",
    )
    add("--out", type=Path, default=Path("bench-input.json"), metavar="FILE", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Runs both parts; returns 0."""
    cores = sorted(os.sched_getaffinity(0))
    if args.cores is not None and args.cores > len(cores):
        raise ConfigError(f"--cores must be at most {len(cores)} on this machine", f"--cores {args.cores}")
    os.sched_setaffinity(0, cores[: args.cores])
    try:
        result = begin("input", args, "this benchmark is one process")
        measure(args, result)
    finally:
        os.sched_setaffinity(0, cores)
    return finish(args, result, report)


def measure(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Adds the figures of both parts."""
    import hvdtrain
    from hvdtrain.datasets import load_folder, synthetic

    with hvdtrain.init("torch", engine="solo", device=args.device) as world:
        from hvdtrain.torch.engines.engine import device_of

        progress(f"1/2 pictures in memory, {args.rounds} rounds")
        images = synthetic(MEMORY_IMAGES * 10 // 9, classes=10, size=32)
        result["memory"] = {"images_per_s": memory_rates(args, world, images.x_train, images.y_train)}
        progress(f"2/2 JPEG files, {args.rounds} rounds")
        with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
            train, _ = load_folder(args.data or write_pictures(Path(folder), size=args.picture_size), world=world)
            made = f"{len(train)} made-up JPEGs of {'x'.join(map(str, args.picture_size))}"
            result["files"] = {"data": train.note if args.data else made}
            result["files"] |= files(args, world, train)
        result["device"] = str(device_of(world))


def interleaved(variants: Mapping[str, Start], args: argparse.Namespace, batch: int) -> dict[str, list[float]]:
    """Images a second of each variant by round; in every round each has one block, the first of a new start."""

    def block(start: Start) -> float:
        batches, end = start()
        try:
            return rate(batches, batch, args.seconds, warm=2 * max(args.workers) + 2)
        finally:
            end()

    return stats.in_turns({name: partial(block, start) for name, start in variants.items()}, args.rounds)


def rate(batches: Iterator[Any], batch: int, seconds: float, *, warm: int) -> float:
    """Images a second that a loop gets which does nothing with them.

    The first `warm` batches do not count: workers start, and what they have read ahead is used up.
    """
    for _ in itertools.islice(batches, warm):
        pass
    _finish()
    start, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < seconds or count < 2:
        next(batches)
        count += 1
    _finish()
    return count * batch / max(time.perf_counter() - start, spent)


def _finish() -> None:
    """Waits for copies to a GPU."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def recommend(images_per_s: Mapping[str, list[float]]) -> int:
    """The fewest workers of ours that reach nearly the best rate."""
    ours = {
        int(name.split()[1]): statistics.median(its)
        for name, its in images_per_s.items()
        if name.startswith("hvdtrain")
    }
    return min(workers for workers, rate in ours.items() if rate >= GOOD_ENOUGH * max(ours.values()))


def report(result: Mapping[str, Any]) -> str:
    """The tables of a result, and what they recommend."""
    memory, its = (result[part]["images_per_s"] for part in ("memory", "files"))
    plain = max((name for name in memory if name != "hvdtrain"), key=lambda name: statistics.median(memory[name]))
    base = "DataLoader, 0 workers" if "DataLoader, 0 workers" in memory else plain
    ratio = stats.ratio_of_medians(memory["hvdtrain"], memory[base])
    best, cores = f"workers={result['files']['recommended_workers']}", result["machine"]["cores_usable"]
    crop = ", random crop + mirror + normalise"
    return "\n\n".join([
        f"{measured_on(result)}; batches on {result['device']}",
        rates(f"pictures in memory, 3x32x32{crop}", memory, base),
        f"in memory: {ratio} times the {base}",
        rates(f"{result['files']['data']}{crop}", its, next(iter(its))),
        f"for files like these: {best} a rank that has {cores} such cores for itself",
    ])  # fmt: skip


def rates(title: str, images_per_s: Mapping[str, Sequence[float]], base: str) -> str:
    """Returns a table of images a second, and of how many times those of `base` they are."""
    medians = {name: statistics.median(its) for name, its in images_per_s.items()}
    rows = [(title, "images/s", f"x {base}")]
    rows += [(name, f"{rate:,.0f}", f"{rate / medians[base]:.2f}") for name, rate in medians.items()]
    return stats.table(rows)


# ---- what is measured


def memory_rates(args: argparse.Namespace, world: World, x: np.ndarray, y: np.ndarray) -> dict[str, list[float]]:
    """Returns the images a second of hvdtrain and of torchvision's per-image pipeline, on the same pictures."""
    import hvdtrain.torch as hvt

    augment = hvt.crop_flip(hvt.CIFAR10_MEAN, hvt.CIFAR10_STD)
    plain = _data_loaders(_Pictures(x, y), args.per_rank_batch, args.workers, world)
    ours = _ours(lambda: (x, y), args.per_rank_batch, world=world, augment=augment)
    return interleaved({**plain, "hvdtrain": ours}, args, args.per_rank_batch)


def files(args: argparse.Namespace, world: World, train: Folder) -> dict[str, Any]:
    """Rates of ours and of torchvision's ImageFolder on the same files, by workers, and how many are best."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import RandomResizedCrop

    import hvdtrain.torch as hvt

    batch = min(max(1, args.per_rank_batch // 4), len(train))
    transform = _transform(RandomResizedCrop(args.image_size), hvt.IMAGENET_MEAN, hvt.IMAGENET_STD)
    folder = ImageFolder(train.root, transform)

    def pictures() -> hvt.ImageFiles:
        return hvt.ImageFiles(train, train=True, size=args.image_size)

    variants: dict[str, Start] = {}
    for workers in args.workers:
        variants |= _data_loaders(folder, batch, [workers], world)
        variants[f"hvdtrain, {workers} workers"] = _ours(pictures, batch, world=world, workers=workers)
    found = interleaved(variants, args, batch)
    return {"images_per_s": found, "recommended_workers": recommend(found)}


def _ours(source: Callable[[], Any], batch: int, **settings: Any) -> Start:
    import hvdtrain.torch as hvt

    def start() -> tuple[Iterator[Any], Callable[[], None]]:
        loader = hvt.loader(source(), batch, tail="drop", **settings)
        return itertools.chain.from_iterable(itertools.repeat(loader)), loader.close

    return start


def _data_loaders(dataset: Any, batch: int, workers: Sequence[int], world: World) -> dict[str, Start]:
    """The loader that PyTorch's examples use; where batches go to a GPU, with pinned memory and without."""
    on_gpu = bool(world.devices)
    pinning = {"": on_gpu} | ({", pin_memory=False": False} if on_gpu else {})
    return {
        f"DataLoader, {count} workers{name}": _plain(dataset, batch, count, world, pin)
        for count in workers
        for name, pin in pinning.items()
    }


def _plain(dataset: Any, batch: int, workers: int, world: World, pin: bool) -> Start:
    from torch.utils.data import DataLoader

    from hvdtrain.torch.engines.engine import device_of

    device = device_of(world)

    def batches(loader: Any) -> Iterator[Any]:
        for x, y in itertools.chain.from_iterable(itertools.repeat(loader)):
            yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    def start() -> tuple[Iterator[Any], Callable[[], None]]:
        keep = workers > 0
        loader: Any = DataLoader(
            dataset, batch, shuffle=True, num_workers=workers, drop_last=True, pin_memory=pin, persistent_workers=keep
        )
        return batches(loader), lambda: _end_workers(loader)

    return start


def _end_workers(loader: Any) -> None:
    iterator = loader._iterator
    if iterator is not None:
        iterator._shutdown_workers()  # as when it is collected, but now: the next block has the cores for itself


class _Pictures:
    """torchvision's CIFAR10 without its download: a PIL image a sample, and its usual transforms."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        from torchvision.transforms import RandomCrop

        import hvdtrain.torch as hvt

        self.pictures, self.labels = x.transpose(0, 2, 3, 1).copy(), y.tolist()
        self.transform = _transform(RandomCrop(32, padding=4), hvt.CIFAR10_MEAN, hvt.CIFAR10_STD)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        return self.transform(Image.fromarray(self.pictures[index])), self.labels[index]


def _transform(crop: Any, mean: Any, std: Any) -> Any:
    """The training transforms of torchvision's examples."""
    from torchvision import transforms as its

    return its.Compose([crop, its.RandomHorizontalFlip(), its.ToTensor(), its.Normalize(mean, std)])


def write_pictures(root: Path, count: int = MADE_UP_FILES, size: Sequence[int] = MADE_UP_SIZE) -> Path:
    """Writes JPEGs with about the bytes a pixel of photographs: noise, enlarged eight times."""
    import numpy as np
    from PIL import Image

    draw = np.random.Generator(np.random.PCG64(0))
    width, height = size
    for number in range(count):
        folder = root / f"class-{number % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(draw.integers(0, 256, (height // 8, width // 8, 3), np.uint8))
        fine = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
        pixels = np.clip(fine + draw.integers(-12, 13, fine.shape), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg", quality=90)
    return root
