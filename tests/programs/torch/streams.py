"""Streams and orders of the user's own on real ranks: who sees what, exact updates, refusals.

usage: streams.py OUT.json SHARDS       rank 0 writes OUT
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import plainly, train, write_results
from shards import SHARDS, features, read_shards
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import ConfigError, HvdtrainError, ReplicaError
from hvdtrain.world.world import World

RECORDS, GLOBAL_BATCH = 25, 12


class Tars(IterableDataset):
    """Shards in the order of the epoch, records as they lie there: bytes by extension, as webdataset gives them."""

    def __init__(self, folder: str) -> None:
        self._paths = sorted(Path(folder).glob("*.tar"))
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, bytes]]:
        paths = list(self._paths)
        random.Random(self._epoch).shuffle(paths)
        return read_shards(paths)


def decoded(record: dict[str, bytes]) -> tuple[Tensor, int]:
    assert get_worker_info() is not None
    noise = torch.rand((), dtype=torch.float64) + np.random.rand() + random.random()
    return torch.from_numpy(np.frombuffer(record["x"]).copy()) + noise / 3, int(record["cls"])


def in_turn(world: World, batches: Any, epochs: int = 2) -> list[list[Any]]:
    """What all ranks got, step by step, in rank order."""
    steps = []
    for _ in batches.epochs(epochs):
        mine = {}
        for values, labels in batches:
            step = batches.step
            assert len(values) == step.samples
            mine[step.number] = (step.global_samples, list(zip(values.tolist(), labels.tolist(), strict=True)))
        everyone = world.gather(mine)
        for number in everyone[0]:
            parts = [its[number] for its in everyone if number in its]  # ranks may have none of the last
            steps.append([pair for _, pairs in parts for pair in pairs])
            assert all(planned == len(steps[-1]) for planned, _ in parts)
    batches.close()
    return steps


def shards_of_tar(world: World) -> Any:
    per_rank = GLOBAL_BATCH // world.size
    return [
        in_turn(world, hvt.loader(Tars(sys.argv[2]), per_rank, decode=decoded, workers=workers, tail="drop"))
        for workers in (1, 2)
    ]


class HuggingFaceLike(IterableDataset):
    """Shares itself out among workers, shuffles in a buffer by seed and epoch, as `datasets.IterableDataset` does."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        rows = iter(range(info.id if info else 0, RECORDS, info.num_workers if info else 1))
        draw, buffer = np.random.default_rng([7, self.epoch]), []
        for row in rows:
            buffer.append(row)
            if len(buffer) == 6:
                yield {"number": buffer.pop(int(draw.integers(6)))}
        yield from ({"number": row} for row in buffer)


def hugging_face(world: World) -> Any:
    batches = hvt.loader(HuggingFaceLike(), GLOBAL_BATCH // world.size, workers=2)
    steps = []
    with torch.no_grad():
        for _ in batches.epochs(2):
            mine = [batch["number"].tolist() for batch in batches]
            steps += [number for part in world.gather(mine) for numbers in part for number in numbers]
    return [sorted(steps[:RECORDS]), sorted(steps[RECORDS:]), steps[:RECORDS] != steps[RECORDS:]]


def rows(epoch: int) -> list[tuple[np.ndarray, float]]:
    x = features(100 + epoch, RECORDS)
    return [(row, float(np.cos(row.sum()) * 3)) for row in x]


def linear() -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(4, 1).double()


def flat(module: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x)[:, 0], y)


def updates(ours: Any, optimizer: Any, batches: Any) -> None:
    train(ours, optimizer, batches, loss_of)


def plain(windows: list[list[tuple[np.ndarray, float]]]) -> list[float]:
    """The same in one process: an update a window."""
    net = linear()
    rows = [zip(*window, strict=True) for window in windows]
    batches = [(torch.from_numpy(np.stack(x)), torch.tensor(y, dtype=torch.float64)) for x, y in rows]
    plainly(net, torch.optim.SGD(net.parameters(), lr=0.1), batches, loss_of)
    return flat(net)


def updates_are_exact(world: World) -> Any:
    """Of 25 records in steps of 12 the last step has one: other ranks have none, whatever an update takes."""
    found = {}
    for accumulate in (1, 2, 3):
        net = linear()
        train = hvt.loader(rows, GLOBAL_BATCH // world.size, workers=int(accumulate == 2))
        options = {"lr": hvdtrain.LR(base=0.1, reference_batch=GLOBAL_BATCH * accumulate), "accumulate": accumulate}
        ours, optimizer = hvt.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), train, **options)
        for _ in train.epochs(2):
            updates(ours, optimizer, train)
        size = GLOBAL_BATCH * accumulate
        windows = [rows(epoch)[at : at + size] for epoch in range(2) for at in range(0, RECORDS, size)]
        found[f"accumulate {accumulate}"] = [flat(net), plain(windows)]
        assert optimizer.progress.samples_seen == 2 * RECORDS and optimizer.progress.step == len(windows)
        assert train.position == (2, 0)
    return found


class Numbers(Dataset):
    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[float, int]:
        return index + random.random(), index


def samplers(world: World) -> Any:
    """Weighted with replacement, drawn by the epoch; a subset; of arrays, which are taken in whole batches."""
    per_rank = GLOBAL_BATCH // world.size
    weighted = WeightedRandomSampler(torch.arange(RECORDS).double(), 30)
    own = RandomSampler(range(RECORDS), generator=torch.Generator())
    numbers = np.arange(RECORDS)
    return [
        in_turn(world, hvt.loader(Numbers(), per_rank, sampler=weighted, workers=1), epochs=2),
        in_turn(world, hvt.loader((numbers * 2.0, numbers), per_rank, sampler=own), epochs=2),
        in_turn(world, hvt.loader(Numbers(), per_rank, sampler=lambda epoch: [3 + epoch, 1, 2], workers=0), epochs=2),
    ]


def buckets(epoch: int) -> list[list[int]]:
    order = np.random.default_rng(epoch).permutation(RECORDS).tolist()
    return [order[:9], order[9:10], order[10:22], order[22:]]


def batches_of_the_users(world: World) -> Any:
    """Batches of 9, 1, 12 and 3 samples: each dealt over the ranks, and each update the mean over its own."""
    of_epoch = [rows(0)[index] for index in range(RECORDS)]
    found = []
    for accumulate in (1, 3):
        net = linear()
        train = hvt.loader(of_epoch, GLOBAL_BATCH // world.size, batch_sampler=buckets, workers=0)
        ours, optimizer = hvt.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), train, accumulate=accumulate)
        for _ in train.epochs(2):
            updates(ours, optimizer, train)
        windows = []
        for epoch in range(2):
            whole = [[of_epoch[index] for index in bucket] for bucket in buckets(epoch)]
            windows += [sum(whole[at : at + accumulate], []) for at in range(0, 4, accumulate)]
        found.append([flat(net), plain(windows)])
    torch_s = hvt.loader(Numbers(), batch_sampler=BatchSampler(range(RECORDS), 10, drop_last=False), workers=0)
    assert torch_s.global_batch == 10
    return found, in_turn(world, torch_s, epochs=1)


def evaluation(world: World) -> Any:
    net = linear()

    def error(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"error": (outputs[:, 0] - targets) ** 2}

    ours = hvt.evaluate(net, rows, error, per_rank_batch=GLOBAL_BATCH // world.size)
    x, y = zip(*rows(0), strict=True)
    with torch.no_grad():
        by_hand = float(((net(torch.from_numpy(np.stack(x)))[:, 0] - torch.tensor(y, dtype=torch.float64)) ** 2).mean())
    return [ours["error"], by_hand]


class Now(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def prediction(world: World) -> Any:
    """Nested outputs of all samples, in order; from arrays, shuffled loaders, data sets, streams; few samples."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.drop = linear(), nn.Dropout()

        def forward(self, x: Tensor) -> Any:
            self.calls = not getattr(self, "calls", True)
            names = {"texts": [str(row.sum().item()) for row in x], "array": x.numpy()}
            others = names if self.calls else dict(reversed(names.items()))  # batches name their parts in any order
            return {"y": self.drop(self.linear(x)), "both": (x.sum(1), x.long()), **others}

    net = Two()
    x = torch.from_numpy(features(3, RECORDS))
    worst = []
    for samples in (1, RECORDS):
        with torch.no_grad():
            right = net.eval()(x[:samples])
        net.train()
        sources: list[Any] = [x[:samples], hvt.loader(x[:samples], 5, seed=3), list(x[:samples])]
        sources += [lambda samples=samples: iter(x[:samples])]
        for source in sources:
            batch = None if isinstance(source, hvt.Loader) else 4
            found = hvt.predict(net, source, per_rank_batch=batch, workers=0)
            worst += [found["y"] - right["y"], found["both"][0] - right["both"][0], found["both"][1] - right["both"][1]]
            assert found["texts"] == right["texts"] and np.array_equal(found["array"], right["array"])
            assert isinstance(found["both"], tuple) and len(found["y"]) == samples and net.training
    pairs = (x.numpy(), np.zeros(RECORDS))
    alone = hvt.predict(net, pairs, per_rank_batch=4, inputs=lambda batch: batch[0], on_main=True)
    assert (alone is None) == (not world.is_main)
    said(lambda: hvt.predict(nn.Flatten(0), x, per_rank_batch=4), ConfigError, "one row per sample", "[samples, ...]")
    said(lambda: hvt.predict(Now(lambda x: x.mean()), x, per_rank_batch=4), ConfigError, "one number, for")
    part = Now(lambda x: (x, x if 0.0 in x else None))
    said(lambda: hvt.predict(part, torch.arange(9.0), per_rank_batch=2), ConfigError, "same structure in every batch")
    return max(float(gap.abs().max()) for gap in worst)


def said(attempt: Callable[[], Any], kind: type[HvdtrainError], *parts: str) -> str:
    try:
        attempt()
    except kind as error:
        assert all(part in str(error) for part in parts), error
        return str(error)
    raise AssertionError(f"not refused: {parts}")


def refusals(world: World) -> Any:
    draws = np.random.default_rng()
    said(lambda: hvt.loader(iter(range(9)), 2, workers=0), ConfigError, "which can be read once", "lambda epoch")
    said(lambda: hvt.loader(lambda: draws.permutation(500), 2), ConfigError, "read twice", "records(epoch)")
    said(lambda: hvt.loader(lambda: [], 2, workers=0), ConfigError, "no record")
    said(lambda: hvt.loader(rows, 2, sampler=[1, 2], workers=0), ConfigError, "and batch_sampler= need a Dataset")
    said(lambda: hvt.loader(Numbers, 2), ConfigError, "the class Numbers")
    said(lambda: hvt.loader(Numbers(), 2, decode=abs), ConfigError, "decode in the data set's __getitem__")
    whole = DistributedSampler(Numbers(), 2, 0)
    said(lambda: hvt.loader(Numbers(), 2, sampler=whole), ConfigError, "remove it")
    said(lambda: hvt.loader(Numbers(), 2, sampler=[0], batch_sampler=[[0]]), ConfigError, "both")
    said(lambda: hvt.loader(Numbers(), batch_sampler=[[0]]), ConfigError, "batch_size", "per_rank_batch=32")
    train = hvt.loader(rows, 4, workers=0)
    said(lambda: train.samples, ConfigError, "LR(total_samples=")
    said(lambda: len(train), ConfigError, "not known before its end")
    net = linear()
    seen = list(zip(range(1), train, strict=False))
    assert len(seen) == 1 and train.step is not None
    ours, optimizer = hvt.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), train, accumulate=6)
    said(lambda: updates(ours, optimizer, [seen[0][1]]), ConfigError, "before the loop")
    train.go_on(0, 26)
    said(lambda: next(iter(train)), ConfigError, "ends after 25")
    if world.size > 1:
        said(lambda: hvt.loader(lambda: range(world.rank, 40, 2), 2), ReplicaError, "rank 1", "split_by_node")
    return True


def streams_that_part_later(world: World) -> Any:
    """Their heads are alike: said at the end of the epoch, on every rank, and not before."""
    others = [*rows(0)[:-1], (np.full(4, float(world.rank)), 1.0)]
    if world.size > 1:  # a data set is compared, whatever names its samples
        said(lambda: hvt.loader(others, 2, sampler=range(RECORDS), workers=0), ReplicaError, "25 samples", "rank 1")
        said(lambda: hvt.loader(rows(0), 2, sampler=[world.rank], workers=0), ReplicaError, "first 1 indices", "rank 1")
    net = linear()
    train = hvt.loader(lambda: others, GLOBAL_BATCH // world.size, workers=0)
    ours, optimizer = hvt.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), train)
    if world.size > 1:
        said(lambda: updates(ours, optimizer, train), ReplicaError, "an epoch of 25 samples", "rank 1", "whole stream")
    return True


CASES = (
    shards_of_tar, hugging_face, updates_are_exact, samplers, batches_of_the_users,
    evaluation, prediction, refusals, streams_that_part_later,
)  # fmt: skip


def main() -> None:
    with hvdtrain.init("torch", seed=5) as world:
        assert len(list(Path(sys.argv[2]).glob("*.tar"))) == SHARDS
        write_results(world, CASES, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
