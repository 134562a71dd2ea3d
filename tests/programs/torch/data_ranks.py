"""The data's side on real ranks: who sees what, evaluation of every small size, and a relay over world sizes.

usage: data_ranks.py OUT.json RELAY.json       rank 0 writes OUT; RELAY is gone on from, and left for the next
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import evaluated
import numpy as np
import torch
from cases import write_results
from torch import Tensor, nn
from torch.utils.data import Dataset

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import ReplicaError
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


CASES = (
    memory_order, worker_order, evaluation, evaluation_of_files, relay, unequal_ranks_are_refused,
    metrics_that_differ_are_refused, *evaluated.CASES,
)  # fmt: skip


def main() -> None:
    with hvdtrain.init("torch", seed=5) as world:
        write_results(world, CASES, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
