"""Data sets that read a batch in one call (`__getitems__`), against torch's DataLoader. Prints which cases passed."""

from __future__ import annotations

import random
import threading
from typing import Any

import datasets
import numpy as np
import torch
from loader_alone import SHORT_WAIT, acted, failed, refused
from passing import run_all
from torch.utils.data import DataLoader, Dataset, Subset

import hvdtrain.torch as hvt
from hvdtrain.core.errors import HvdtrainError
from hvdtrain.world.world import World

SAMPLES = 22


class Asked(Dataset):
    """Each sample is its index, and how many were asked for in the call."""

    def __len__(self) -> int:
        return SAMPLES

    def one(self, index: int, asked: int) -> Any:
        return index, asked

    def __getitem__(self, index: int) -> Any:
        return self.one(index, 1)

    def __getitems__(self, indices: list[int]) -> Any:
        assert type(indices) is list and all(type(index) is int for index in indices)
        return [self.one(index, len(indices)) for index in indices]


def read(train: Any) -> list[Any]:
    return [[part.tolist() for part in batch] if isinstance(batch, list | tuple) else batch for batch in train]


def case_a_batch_is_asked_for_where_torch_does() -> None:
    plain = read(DataLoader(Asked(), 4))
    assert plain[0] == [[0, 1, 2, 3], [4, 4, 4, 4]]
    whole = {"world": World.solo(), "shuffle": False}
    for workers in (0, 2):
        assert read(hvt.loader(Asked(), 4, workers=workers, **whole)) == plain
        order = {"sampler": list(range(SAMPLES)), "workers": workers}
        assert read(hvt.loader(Asked(), 4, world=World.solo(), **order)) == plain
        parts = [list(range(at, min(at + 4, SAMPLES))) for at in range(0, SAMPLES, 4)]
        assert read(hvt.loader(Asked(), 4, world=World.solo(), batch_sampler=parts, workers=workers)) == plain
    some = Subset(Asked(), [5, 3, 9])
    assert read(hvt.loader(some, 2, workers=0, **whole)) == read(DataLoader(some, 2)) == [[[5, 3], [2, 2]], [[9], [1]]]
    table = datasets.Dataset.from_dict({"x": np.arange(66.0).reshape(22, 3), "y": list(range(22))}).with_format("torch")
    for ours, its in zip(hvt.loader(table, 4, workers=0, **whole), DataLoader(table, 4), strict=True):
        assert ours.keys() == its.keys() and all(torch.equal(ours[name], its[name]) for name in its)

    class Batches(Asked):
        def __getitems__(self, indices: list[int]) -> Any:
            return {"indices": torch.tensor(indices)}

    for given in (
        hvt.loader(Batches(), 4, workers=0, collate=dict, **whole),
        DataLoader(Batches(), 4, collate_fn=dict),
    ):
        assert [batch["indices"].tolist() for batch in given] == [indices for indices, _ in plain]


class Drawn(Asked):
    """Augments by all three generators."""

    calls = 0

    def one(self, index: int, asked: int) -> Any:
        Drawn.calls += 1
        return index, torch.rand(()).double() + float(np.random.rand()) + random.random()


def masked(samples: list[Any]) -> Any:
    return (
        torch.tensor([sample[0] for sample in samples]),
        torch.rand(len(samples)),
        [random.random(), np.random.rand()],
    )


def case_random_numbers_stay_those_of_each_sample() -> None:
    """At any number of ranks, as read one by one; and what collate draws (masks of tokens) is what it was."""

    class OneByOne(Drawn):
        __getitems__ = None

    def of(dataset: Any, size: int) -> list[Any]:
        loaders = [hvt.loader(dataset(), 8 // size, world=acted(r, size), seed=3, workers=0) for r in range(size)]
        return sorted(
            tuple(pair) for train in loaders for x, y in train for pair in zip(x.tolist(), y.tolist(), strict=True)
        )

    right = of(OneByOne, 1)
    Drawn.calls = 0
    assert of(Drawn, 1) == of(Drawn, 4) == right
    assert Drawn.calls < 2 * SAMPLES + 5 * 8 + 70  # asked in vain once a pass and rank, and for the digest

    class Plain(Asked):
        __getitems__ = None

    seen = [read_drawn(kind()) for kind in (Asked, Plain)]
    assert seen[0] == seen[1]


def read_drawn(dataset: Any) -> list[Any]:
    train = hvt.loader(dataset, 4, world=World.solo(), seed=3, workers=0, collate=masked)
    return [(indices.tolist(), drawn.tolist(), rest) for indices, drawn, rest in train]


def case_errors_name_the_sample() -> None:
    class Broken(Asked):
        def one(self, index: int, asked: int) -> Any:
            if index == 5 and (asked > 1 or not self.only_together):
                raise self.kind("a bug of the user's")
            return index, asked

    for workers in (0, 1):
        for kind in (KeyError, StopIteration):
            for Broken.only_together in (False, True):
                Broken.kind = kind
                where = "samples 4, 5, 6, 7 in one call of __getitems__" if Broken.only_together else "sample 5"
                train = hvt.loader(Broken(), 4, world=World.solo(), workers=workers, shuffle=False)
                text = failed(lambda train=train: list(train), RuntimeError if kind is StopIteration else kind)
                assert "a bug of the user's" in text and f"while reading {where}" in text, text

    class Short(Asked):
        def __getitems__(self, indices: list[int]) -> Any:
            return indices[1:]

    train = hvt.loader(Short(), 4, world=World.solo(), workers=0, shuffle=False)
    refused(lambda: list(train), "__getitems__", "one sample per index", "3 samples for 4 indices", kind=HvdtrainError)


@SHORT_WAIT
def case_a_call_that_hangs_is_named_with_its_first_sample() -> None:
    class Hanging(Asked):
        def one(self, index: int, asked: int) -> Any:
            if index == 6:
                threading.Event().wait()
            return index, asked

    for order in ({}, {"sampler": list(range(SAMPLES))}):
        train = hvt.loader(Hanging(), 4, world=World.solo(), workers=1, shuffle=False, timeout_s=1, **order)
        refused(lambda train=train: list(train), "still at sample 4, or another sample", kind=HvdtrainError)


def case_unreadable_samples_of_a_batch_are_left_out() -> None:
    class Some(Asked):
        def one(self, index: int, asked: int) -> Any:
            return hvt.Unreadable(f"file {index}", "broken") if index == 6 else super().one(index, asked)

    train = hvt.loader(Some(), 4, world=World.solo(), workers=0, shuffle=False)
    assert read(train)[1] == [[4, 5, 7], [4, 4, 4]] and train.skipped == [("file 6", "broken")]


if __name__ == "__main__":
    run_all(globals())
