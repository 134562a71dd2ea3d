"""The data's side on real ranks: who sees what, evaluation of every small size, and a relay over world sizes.

usage: data_ranks.py OUT.json RELAY.json IMAGES       rank 0 writes OUT; RELAY is gone on from, and left for the next
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import evaluated
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import ConfigError, ReplicaError
from hvdtrain.datasets import load_folder
from hvdtrain.world.world import World

SAMPLES, GLOBAL_BATCH, CLASSES = 53, 12, 5


class Jitter:
    """An augmentation that shows its random numbers: sample i becomes i + a number in [0, 1)."""

    draws = 5

    def __call__(self, batch: Tensor, uniforms: Tensor) -> Tensor:
        assert uniforms.shape == (len(batch), 5)
        return batch + uniforms.mean(1)


class Random(Dataset):
    """Samples with random transforms of all three generators, as users' data sets have them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        import random

        return index + (torch.rand((), dtype=torch.float64) + np.random.rand() + random.random()) / 3, index


def data() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.Generator(np.random.PCG64(3))
    return draw.normal(size=(40, 6)), draw.integers(0, CLASSES, 40)


def model() -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    return net.double()


def training_order(world: World, where: Any, **options: Any) -> list[list[float]]:
    """Two epochs of what all ranks got, step by step, in rank order; padding left out."""
    steps: list[list[float]] = []
    batches = hvt.loader(where, GLOBAL_BATCH // world.size, seed=7, **options)
    for _ in batches.epochs(2):
        for values, labels in batches:
            assert batches.step is not None
            assert [int(value) for value in values] == labels.tolist()
            mine = [] if batches.step.padding else values.tolist()
            assert len(mine) == batches.step.samples
            got = [value for part in world.gather(mine) for value in part]
            assert len(got) == batches.step.global_samples
            steps.append(got)
    batches.close()
    return steps


def memory_order(world: World) -> Any:
    numbers = np.arange(SAMPLES)
    return training_order(world, (numbers.astype(np.float64), numbers), augment=Jitter())


def worker_order(world: World) -> Any:
    return training_order(world, Random(), workers=1)


class Holes(Dataset):
    """Samples of which some cannot be read: more in some batches than in others."""

    bad = (3, 17, 18, 19, 20, 40)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x = torch.tensor([index / SAMPLES, 1.0], dtype=torch.float64)
        return hvt.Unreadable(str(index), "missing") if index in self.bad else (x, x[:1].cos() * 3)


def training_without_what_cannot_be_read(world: World) -> Any:
    """Updates are the mean over the samples that are there; `plain` is the same, written by hand on one process."""
    torch.manual_seed(2)
    net = nn.Linear(2, 1).double()
    twin = nn.Linear(2, 1).double()
    twin.load_state_dict(net.state_dict())
    train = hvt.loader(Holes(), GLOBAL_BATCH // world.size, workers=0)
    ours, optimizer = hvt.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5), train, accumulate=2)
    for _ in train.epochs(2):
        for x, y in train:
            optimizer.zero_grad()
            optimizer.backward(nn.functional.mse_loss(ours(x), y))
            optimizer.step()
    plain = torch.optim.SGD(twin.parameters(), lr=0.5)
    planned_only = 0
    for epoch in range(2):
        order = train.plan.order(epoch).tolist()
        for start in range(0, SAMPLES, 2 * GLOBAL_BATCH):
            window = order[start : start + 2 * GLOBAL_BATCH]
            rows = [Holes()[index] for index in window if index not in Holes.bad]
            planned_only += len(window) != len(rows)
            plain.zero_grad()
            nn.functional.mse_loss(
                twin(torch.stack([x for x, _ in rows])), torch.stack([y for _, y in rows])
            ).backward()
            plain.step()
    assert planned_only > 2  # else nothing was shown
    flat = [torch.cat([p.detach().flatten() for p in module.parameters()]).tolist() for module in (net, twin)]
    return {"ours": flat[0], "plain": flat[1]}


def evaluation(world: World) -> Any:
    x, y = data()
    net = model()
    metrics = hvt.classification(top=(1, 2), label_smoothing=0.1)
    return [
        hvt.evaluate(net, (x[:samples], y[:samples]), metrics, per_rank_batch=4, world=world)
        for samples in range(1, 41)
    ]


def evaluation_of_files(world: World) -> Any:
    """Through workers; the buffers of replicas differ, and the model has a part that is in evaluation mode already."""
    x, y = data()
    net = model()
    net[1].running_mean += world.rank  # mean over ranks: (size - 1) / 2
    net[3].eval()
    rows = [(torch.from_numpy(x[i]), int(y[i])) for i in range(17)]
    scores = hvt.evaluate(net, rows, hvt.classification(top=(1,)), per_rank_batch=2, workers=1)
    assert net.training and net[1].training and not net[3].training
    assert torch.allclose(net[1].running_mean, torch.full((8,), (world.size - 1) / 2, dtype=torch.float64))
    net[1].running_mean -= (world.size - 1) / 2
    again = hvt.evaluate(net, rows, hvt.classification(top=(1,)), per_rank_batch=2, workers=0)
    return {"shifted": scores, "right": again}


def padded_evaluation(world: World) -> Any:
    """The negative twin: what the usual DistributedSampler and a mean of ranks' means make of 17 samples."""
    x, y = data()
    net = model().eval()
    mine = list(DistributedSampler(range(17), world.size, world.rank, shuffle=False))
    with torch.no_grad():
        values = hvt.classification(top=(1, 2), label_smoothing=0.1)(
            net(torch.from_numpy(x[mine])), torch.from_numpy(y[mine])
        )
    return world.mean({name: float(value.double().mean()) for name, value in values.items()})


def relay(world: World) -> Any:
    """Four batches, from where another number of ranks stopped."""
    path = Path(sys.argv[2])
    numbers = np.arange(1000)
    batches = hvt.loader((numbers.astype(np.float64), numbers), 12 // world.size, seed=7, augment=Jitter())
    if path.exists():
        batches.load_state_dict(json.loads(path.read_text()))
    start = batches.position
    seen: list[float] = []
    state, left = batches.state_dict(), 0
    if world.size == 1:  # the last runner ends the epoch
        for epoch in batches.epochs(1):
            assert epoch == 0
            for values, _ in batches:
                seen += values.tolist()
        state, left = batches.state_dict(), len(batches)
    else:
        for number, (values, _) in enumerate(batches):
            seen += [value for part in world.gather(values.tolist()) for value in part]
            if number == 3:
                state, left = batches.state_dict(), len(batches)
                break
    world.barrier()
    if world.is_main:
        path.write_text(json.dumps(state))
    return {"start": start, "seen": seen, "end": [state["epoch"], state["samples_in_epoch"]], "left": left}


def unequal_ranks_are_refused(world: World) -> Any:
    numbers = np.arange(SAMPLES + world.rank)
    for attempt in (
        lambda: hvt.loader((numbers,), 4),
        lambda: hvt.loader((np.arange(SAMPLES),), 4 + world.rank),
        lambda: hvt.loader((np.arange(SAMPLES),), 4, seed=world.rank),
    ):
        try:
            attempt()
        except ReplicaError as error:
            assert error.shared and "rank 0" in str(error), error
        else:
            assert world.size == 1, "not refused"
    return True


def metrics_that_differ_are_refused(world: World) -> Any:
    def mine(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {f"of rank {world.rank}": targets.double()}

    x, y = data()
    try:
        hvt.evaluate(model(), (x, y), mine, per_rank_batch=4)
    except ReplicaError as error:
        assert "of rank 0" in str(error) and "of rank 1" in str(error)
    else:
        assert world.size == 1, "not refused"
    return True


def images(world: World) -> Any:
    """One corrupt file among the pictures: every rank knows its name at the end, and the counts are right."""
    train, val = load_folder(sys.argv[3], world=world)
    assert val is not None
    batches = hvt.loader(hvt.ImageFiles(train, train=True, size=16), 12 // world.size, workers=1)
    counted, planned, labels = 0, 0, []
    for pictures, classes in batches:
        step = batches.step
        assert step is not None and pictures.shape[1:] == (3, 16, 16) and pictures.dtype == torch.float32
        assert not step.padding and len(pictures) == step.samples > 0
        counted += step.samples
        planned += step.global_samples
        labels += classes.tolist()
    skipped = batches.all_skipped()
    batches.close()
    net = nn.Sequential(nn.Flatten(), nn.Linear(768, len(train.classes)))
    nn.init.constant_(net[1].weight, 0.0)
    nn.init.zeros_(net[1].bias)  # equal scores: the first class is right, and nothing else
    scores = hvt.evaluate(
        net, hvt.ImageFiles(train, train=False, size=16), hvt.classification(top=(1,)), per_rank_batch=5, workers=0
    )
    everywhere = world.gather((counted, sorted(labels)))
    return {
        "counted": sum(count for count, _ in everywhere), "planned": planned, "samples": len(train),
        "labels": sorted(label for _, its in everywhere for label in its), "scores": scores,
        "skipped": [[os.path.basename(name), reason] for name, reason in skipped], "classes": train.classes,
    }  # fmt: skip


def strict(world: World) -> Any:
    """Refused by whoever meets it: on the ranks that do not, the loop would go on, so only one rank is asked here."""
    if world.size > 1:
        return None
    train, _ = load_folder(sys.argv[3], world=world)
    for workers in (0, 1):
        batches = hvt.loader(hvt.ImageFiles(train, train=True, size=16, strict=True), 4, workers=workers)
        try:
            for _ in batches:
                pass
        except ConfigError as error:
            assert "corrupt.jpg" in error.received and "UnidentifiedImageError" in error.received, error
        else:
            raise AssertionError("not refused")
        batches.close()
    return True


CASES = (
    memory_order, worker_order, evaluation, evaluation_of_files, padded_evaluation, relay, unequal_ranks_are_refused,
    metrics_that_differ_are_refused, images, strict, training_without_what_cannot_be_read, *evaluated.CASES,
)  # fmt: skip


def main() -> None:
    results = {}
    with hvdtrain.init("torch", seed=5) as world:
        for case in CASES:
            try:
                results[case.__name__] = case(world)
            except Exception:
                print(f"rank {world.rank}: {case.__name__}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                os._exit(3)
        if world.is_main:
            Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
