"""The histories of the PyTorch adapter."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import horovod.torch  # noqa: F401  (before the fork)
import numpy as np
import torch
from forked import Job
from ledger import BASE, EPSILON, MOMENTUM, REFERENCE, SECOND, History, first_weights, order_of, rows_of, uneven
from PIL import Image
from shards import read_shards
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, RandomSampler

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.datasets.folder import load_folder
from hvdtrain.torch.data.images import ImageFiles


class Rows(Dataset):
    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = rows_of([index])
        return x[0], y[0]


class Shuffled(IterableDataset):
    """Is told the epoch, as Hugging Face's streams are."""

    def __init__(self, samples: int) -> None:
        self._samples, self._epoch = samples, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(records(self._samples, self._epoch))


def records(samples: int, epoch: int) -> list[tuple[np.ndarray, np.ndarray]]:
    x, y = rows_of(order_of(samples, epoch))
    return list(zip(x, y, strict=True))


class Bucketed:
    """Global batches of two lengths, in an order that is drawn by PyTorch's generator."""

    def __init__(self, samples: int, rows: int) -> None:
        self._samples, self._rows = samples, rows

    def __iter__(self) -> Iterator[list[int]]:
        return iter(uneven(torch.randperm(self._samples).tolist(), self._rows))


class OfPictures:
    """Makes inputs of pictures, whose first value is their id."""

    draws = 0

    def __call__(self, pictures: Tensor, _: Tensor) -> Tensor:
        return torch.from_numpy(rows_of(pictures[:, 0, 0, 0].numpy())[0])


def pictures(folder: Path, samples: int, world: Any) -> Any:
    """A folder of two classes, written once; the target is the class, so rows of targets are looked up by `targets`."""

    def write() -> None:
        if folder.exists():
            return
        for number in range(samples):
            part = folder / "ab"[number % 2]
            part.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((2, 2, 3), number, np.uint8)).save(part / f"{number}.png")
        (folder / "b").mkdir(exist_ok=True)

    world.on_main(write)
    files = load_folder(folder, world=world)[0]
    return ImageFiles(files, train=True, size=2, transform=lambda picture: picture, augment=OfPictures())


def shards(folder: Path, samples: int, world: Any) -> Any:
    """Tars in an order of the epoch, each with records in the order they lie there."""

    def write() -> None:
        if folder.exists():
            return
        folder.mkdir()
        for at in range(0, samples, 7):
            with tarfile.open(folder / f"{at:03}.tar", "w") as tar:
                for number in range(at, min(at + 7, samples)):
                    member = tarfile.TarInfo(f"{number:04}.id")
                    content = str(number).encode()
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))

    world.on_main(write)
    paths = sorted(folder.glob("*.tar"))
    return lambda epoch: read_shards([paths[at] for at in order_of(len(paths), epoch)])


def decoded(record: dict[str, bytes]) -> tuple[np.ndarray, np.ndarray]:
    x, y = rows_of([int(record["id"])])
    return x[0], y[0]


def loader(of: History, batch: int, job: Job, world: Any) -> Any:
    options: dict[str, Any] = {"tail": of.tail, "seed": abs(of.number)}
    data: Any = Rows(of.samples)
    match of.kind:
        case "arrays":
            data = rows_of(range(of.samples))
        case "dataset":
            options["workers"] = of.number // 8 % 2
        case "pictures":
            data = pictures(job.folder / "pictures", of.samples, world)
        case "records":
            data = lambda epoch: records(of.samples, epoch)  # noqa: E731
        case "iterable":
            data = Shuffled(of.samples)
            options["workers"] = of.number // 8 % 2
        case "shards":
            data = shards(job.folder / "shards", of.samples, world)
            options["decode"] = decoded
        case "sampler":
            options["sampler"] = RandomSampler(data)
        case "batches":
            options["batch_sampler"] = Bucketed(of.samples, batch * world.size)
    return hvt.loader(data, batch, **{"workers": 0, **options})


def model_of() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), first_weights(), strict=True):
            parameter.copy_(torch.from_numpy(value.T))
    return model


def train(job: Job) -> None:
    of, life = job.history, job.life
    with hvdtrain.init("torch", seed=1, engine=life.engine if life.size > 1 else "solo") as world:
        data = loader(of, life.batch, job, world)
        model: Any = model_of()
        optimizer: Any
        if of.optimizer == "sgd":
            optimizer = torch.optim.SGD(model.parameters(), BASE, momentum=MOMENTUM)
        else:
            optimizer = torch.optim.Adam(model.parameters(), BASE, betas=(MOMENTUM, SECOND), eps=EPSILON)
        total = of.samples * of.epochs
        schedule: dict[str, Any] = {"schedule": "cosine", "total_samples": total} if of.decays else {}
        lr = hvdtrain.LR(BASE, REFERENCE, scale="sqrt", warmup_samples=of.samples // 2, **schedule)
        model, optimizer = hvt.prepare(model, optimizer, data, lr=lr, accumulate=of.accumulate)
        checkpoints = hvdtrain.Checkpointer(job.folder / "checkpoints", best=None, keep=2, asynchronous=life.writes)
        state = hvt.model_state(model, optimizer)
        checkpoints.restore(state)
        job.begins(world, optimizer.progress.step, data.global_batch, 0)
        if fit(job, data, model, optimizer, checkpoints, state):
            job.ends(world, [parameter.detach().numpy().T for parameter in model.parameters()])


def fit(job: Job, data: Any, model: Any, optimizer: Any, checkpoints: Any, state: Any) -> bool:
    """Trains; returns whether it came to the end."""
    for count, epoch in enumerate(data.epochs(job.history.epochs), 1):
        for number, (x, y) in enumerate(data):
            if number == 0:
                job.at("began", count)
            ids = x[:, 0].int().tolist()
            if job.history.kind == "pictures":
                y = torch.from_numpy(rows_of(ids)[1])
            job.batches.append([] if data.step.padding else ids)
            optimizer.zero_grad()
            optimizer.backward(nn.functional.mse_loss(model(x[:, 1:]), y))
            job.at("gathered")
            before = optimizer.progress.step
            optimizer.step()
            done = optimizer.progress.step
            if done == before:
                continue
            job.note(done, epoch, optimizer.param_groups[0]["lr"])
            job.at("updated")
            leaves = job.at("left")
            if leaves or done % job.life.every == 0:
                checkpoints.save(state, progress=optimizer.progress)
            if leaves:
                return False
            job.at("saved")
        job.at("ended", count)
    checkpoints.save(state, progress=optimizer.progress)
    return True


if __name__ == "__main__":
    forked.main(train)
