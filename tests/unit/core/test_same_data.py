"""Ranks that hold other data, or the same in another order, are told apart cheaply, and told what it looks like."""

from __future__ import annotations

import dataclasses
import datetime
import io
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hvdtrain import ReplicaError
from hvdtrain.world import same_data


def refusal(parts: list[Any], digest: Callable[[Any], same_data.Digest] = same_data.of_arrays) -> str:
    """What ranks that hold these parts are told; empty if they pass."""
    digests = [digest(part) for part in parts]
    try:
        same_data.check(SimpleNamespace(size=len(parts), gather=lambda _: digests), digests[0])  # type: ignore[arg-type]
    except ReplicaError as error:
        assert error.shared
        return str(error)
    return ""


def arrays(samples: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(samples, 5)).astype("float32"), rng.integers(0, 3, samples)


X, Y = arrays()
OTHER = np.random.default_rng(1).permutation(60)
LARGE = np.random.default_rng(2).normal(size=(4096, 400))  # more than is digested whole


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([(X[r::2], Y[r::2]) for r in range(2)], "not a part such as x[rank::size]"),
        ([LARGE[r::2] for r in range(2)], "rank 1: 2048 samples"),
        ([(X, Y), (X[OTHER], Y[OTHER])], "the contents of [0], [1] differ"),
        ([LARGE, LARGE[::-1]], "the contents of data differ"),
        ([(X, Y), (X[:40], Y[:40])], "rank 1: 40 samples"),
        ([(X, Y), (X.astype("float64"), Y)], "float64[5]"),
        ([{"x": X, "y": Y}, {"x": X, "y": (Y + (np.arange(60) == 30)) % 3}], "the contents of ['y'] differ"),
        ([X, np.vstack([X[:-1], X[:1]])], "differ"),  # one row of sixty
        ([(X, None), (X, Y)], "None"),
        ([np.array(["a", "b"], object), np.array(["b", "a"], object)], "the contents of data differ"),
    ],
)
def test_ranks_with_other_data_are_refused(parts: list[Any], said: str) -> None:
    told = refusal(parts)
    assert said in told and "rank 0: " in told and "rank 1: " in told and "fix: " in told, told


@pytest.mark.parametrize(
    "data", [X, (X, Y), {"a": X, "b": [Y, None]}, LARGE, np.zeros((0, 3)), (X, np.array(["a"] * 60))]
)
def test_ranks_with_the_same_data_pass(data: Any) -> None:
    copies = [data, np.copy(data)] if isinstance(data, np.ndarray) else [data, data]
    assert refusal(copies) == ""


class Items:
    def __init__(self, seed: int = 0, noise: Callable[[], float] = lambda: 0.0, order: Any = None) -> None:
        self.x, self.y = arrays(seed=seed)
        self.noise, self.order = noise, np.arange(60) if order is None else order

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        index = self.order[index]
        return self.x[index] + self.noise(), int(self.y[index])


def test_data_sets_are_compared_by_some_of_their_items() -> None:
    assert refusal([Items(), Items()], same_data.of_items) == ""
    assert "the same seed" in refusal([Items(0), Items(1)], same_data.of_items)
    assert "must be the same on every rank" in refusal([Items(), Items(order=OTHER)], same_data.of_items)


def test_augmentation_is_not_taken_for_other_data() -> None:
    """Neither by the global generators (set alike for the reads, then put back) nor by one of the data set's own."""
    random.seed(3)
    before = random.getstate()
    assert refusal([Items(noise=random.random), Items(noise=random.random)], same_data.of_items) == ""
    assert random.getstate() == before
    own = [np.random.default_rng(seed) for seed in range(2)]
    assert refusal([Items(noise=generator.normal) for generator in own], same_data.of_items) == ""
    # the labels still are
    assert refusal([Items(k, noise=generator.normal) for k, generator in enumerate(own)], same_data.of_items)


@dataclasses.dataclass
class Record:
    value: int
    inner: list[Any]


class Slotted:
    __slots__ = ("value", "never_set")

    def __init__(self, value: int) -> None:
        self.value = value


RECORDS: dict[str, Callable[[int], Any]] = {
    "dataclass": lambda n: Record(n, [n]),
    "slots": Slotted,
    "date": lambda n: datetime.datetime(2020, 1, n + 1),
    "path": lambda n: Path(f"/data/{n}.png"),
    "set": lambda n: {f"{n}", "always"},
    "bytes in memory": lambda n: io.BytesIO(bytes([n])),
    "picture": lambda n: Image.fromarray(np.full((8, 8, 3), n, np.uint8)),
    "objects in an array": lambda n: np.array([Record(n, [])], object),
    "function": lambda n: [min, max][n],
    "mask": lambda n: np.ma.masked_array([1, 2], [bool(n), False]),
    "parts exchanged": lambda n: {"a": n, "b": 1 - n},
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_glance_tells_records_apart_and_the_same_ones_not(name: str) -> None:
    first, again, other = (list(same_data.glance(RECORDS[name](n))) for n in (0, 0, 1))
    assert first == again != other
