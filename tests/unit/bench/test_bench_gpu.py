"""What the checks of `hvdtrain bench gpu` compare, and what ranks that share a GPU send."""

from __future__ import annotations

import math

import pytest
import torch

from hvdtrain.bench.gpu.check import Goal, apart
from hvdtrain.bench.gpu.right import _returned, _staged

A = {"weight": torch.tensor([1.0, -2.0], dtype=torch.float64), "none": torch.zeros(0)}


@pytest.mark.parametrize(
    ("change", "expected"), [(0.0, 0.0), (3e-10, 3e-10), (math.nan, math.inf), (math.inf, math.inf)]
)
def test_the_largest_difference(change: float, expected: float) -> None:
    other = A | {"weight": A["weight"] + torch.tensor([0.0, change])}
    found = apart(other, A)
    assert found == pytest.approx(expected, rel=1e-4) and Goal("off", found, 1e-10).kept == (expected == 0)


def test_other_names_are_a_difference() -> None:
    assert apart({"weight": A["weight"]}, A) == math.inf


def test_copies_travel_and_come_back() -> None:
    """In place, in groups, and as a new tensor; of what was not staged nothing is known."""
    sent: dict[int, list[torch.Tensor]] = {}
    pending: dict[int, list[torch.Tensor]] = {}

    def start(tensors: torch.Tensor | list[torch.Tensor], name: str) -> int:
        copies = tensors if isinstance(tensors, list) else [tensors]
        sent[len(sent)] = [copy.mul_(2.0) for copy in copies]
        return len(sent) - 1

    def finish(handle: int) -> torch.Tensor | list[torch.Tensor]:
        return sent[handle] if len(sent[handle]) > 1 else sent[handle][0]

    synchronize = _returned(finish, pending)
    results = {}
    for name in ("grouped_allreduce_async_", "allgather_async"):
        start.__name__ = name
        given = [torch.ones(2), torch.full((3,), 2.0)]
        handle = _staged(start, pending)(given if name.endswith("_") else given[1], name="a")
        results[name] = synchronize(handle), given
    (group, given), (single, untouched) = results.values()
    assert all(mine is its for mine, its in zip(group, given, strict=True))
    assert [its.tolist() for its in given] == [[2.0, 2.0], [4.0, 4.0, 4.0]]
    assert single.tolist() == [4.0, 4.0, 4.0] and untouched[1].tolist() == [2.0, 2.0, 2.0]
    assert not pending and synchronize(0) is sent[0]
