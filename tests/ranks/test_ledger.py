"""Exactly once at any size: random histories of kills, resumes and resizes, judged by the samples that are in the
weights (`support/ledger.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import PROGRAMS, quick_folder, run_ranks
from ledger import by_hand, history, judged
from limits import Limit

FEW = {"torch": by_hand("torch"), "keras-torch": by_hand("keras-torch"), "keras-tensorflow": [-2]}
MANY, EACH = {"torch": 180, "keras-torch": 72, "keras-tensorflow": 48}, 12


def lived(adapter: str, numbers: Sequence[int]) -> tuple[dict[str, list[str]], float]:
    """Lives histories; returns what is wrong with those that are not as if nothing had happened, and the largest gap
    to weights that numpy computes from the same global batches."""
    with quick_folder() as folder:
        framework, _, backend = adapter.partition("-")
        program, env = PROGRAMS / "ledger" / f"of_{framework}.py", {"KERAS_BACKEND": backend} if backend else {}
        arguments: list[str | Path] = [program, folder, adapter, *map(str, numbers)]
        run_ranks(arguments, 1, env=env, timeout_s=60 + 40 * len(numbers), grace_s=60).check()
        all_of_them = [history(adapter, number) for number in numbers]
        found = {f"{its.number}: {its}": judged(its, folder / str(its.number)) for its in all_of_them}
    return {of: wrong for of, (wrong, _) in found.items() if wrong}, max(gap for _, gap in found.values())


@pytest.mark.parametrize(
    "adapter", ["torch", "keras-torch", pytest.param("keras-tensorflow", marks=pytest.mark.thorough)]
)
def test_every_sample_once_an_epoch(adapter: str, limit: Limit) -> None:
    wrong, gap = lived(adapter, FEW[adapter])
    assert wrong == {}
    row, name = ("T20", "PyTorch") if adapter == "torch" else ("K20a", adapter.replace("keras-", "Keras on "))
    limit(row, f"{name}: killed at any update, resumed on other ranks, with other batches", exact=gap)
    if adapter == "keras-torch":  # by hand
        limit(
            "K20b", "what is left of an epoch leaves one of more ranks without a sample", mended="counts nothing there"
        )
        limit("K20c", 'tail="drop": it fills no step of more ranks', mended="goes on with the next epoch")
        limit("K20d", "a PyDataset that shuffles in on_epoch_begin", mended="resumed in the same order")


@pytest.mark.thorough
@pytest.mark.parametrize(("adapter", "first"), [(name, at) for name in MANY for at in range(0, MANY[name], EACH)])
def test_many_histories(adapter: str, first: int) -> None:
    assert lived(adapter, range(first, first + EACH))[0] == {}
