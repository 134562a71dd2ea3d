"""Data on real ranks: N ranks see, augment and evaluate what one process does, and a run goes on at any other size.

One launch a world size runs all cases (`programs/torch/data_ranks.py`), each goes on in the epoch where the one before
stopped; here their results are compared.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import PROGRAMS, run_ranks

PROGRAM = PROGRAMS / "torch" / "data_ranks.py"
RUNS = (3, 1)  # the last one ends the epoch of the relay


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    folder = tmp_path_factory.mktemp("data")
    found = {}
    for size in RUNS:
        out = folder / f"{size}.json"
        run_ranks([PROGRAM, out, folder / "relay.json"], size, timeout_s=150).check()
        found[size] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("case", ["memory_order", "worker_order"])
def test_same_samples_and_random_numbers(results: dict[int, Any], case: str) -> None:
    one = results[1][case]
    assert results[3][case] == one
    assert [sorted(int(value) for step in epoch for value in step) for epoch in (one[:5], one[5:])] == [
        list(range(53)), list(range(53)),
    ]  # fmt: skip
    assert one[0] != one[5]  # another order, and other random numbers, in the next epoch
    first, second = ({int(value): value for step in epoch for value in step} for epoch in (one[:5], one[5:]))
    assert sum(first[sample] != second[sample] for sample in first) > 50


def test_evaluation_of_1_to_40_samples_equals_one_process(results: dict[int, Any]) -> None:
    for samples, (ours, one) in enumerate(zip(results[3]["evaluation"], results[1]["evaluation"], strict=True), 1):
        assert set(ours) == {"loss", "top1", "top2"}
        for name, value in one.items():
            assert ours[name] == pytest.approx(value, rel=1e-12, abs=1e-12), (samples, name)


@pytest.mark.parametrize("size", RUNS)
@pytest.mark.parametrize("case", ["dicts", "corpus"])
def test_metrics_of_any_kind_are_those_of_all_samples(results: dict[int, Any], case: str, size: int) -> None:
    """Dicts as batches, tokens that count, metrics with states, all predictions at once; a rank without samples."""
    expected = results[1]["plain"][case]
    assert results[size][case] == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert list(results[size][case]) == list(expected)


def test_what_a_loop_kept_comes_in_order(results: dict[int, Any]) -> None:
    first, second = one = results[1]["gathered"]
    assert results[3]["gathered"] == one and first != second and sorted(first) == sorted(second)
    assert results[3]["refused"]


def test_evaluation_makes_buffers_equal(results: dict[int, Any]) -> None:
    ours, one = results[3]["evaluation_of_files"], results[1]["evaluation_of_files"]
    assert ours["right"] == pytest.approx(one["right"], rel=1e-12)
    assert abs(ours["shifted"]["loss"] - one["shifted"]["loss"]) > 1e-6  # the shift was felt: by the mean of ranks


def test_exactly_once_over_a_relay_of_world_sizes(results: dict[int, Any]) -> None:
    runs = [results[size]["relay"] for size in RUNS]
    assert [run["start"] for run in runs] == [[0, 0], [0, 48]]
    assert [run["end"] for run in runs] == [[0, 48], [1, 0]]
    seen = [value for run in runs for value in run["seen"]]
    assert sorted(map(int, seen)) == list(range(1000))
    assert len(seen) == len(set(seen)) == 1000


@pytest.mark.parametrize("size", RUNS)
def test_refusals(results: dict[int, Any], size: int) -> None:
    assert results[size]["unequal_ranks_are_refused"] and results[size]["metrics_that_differ_are_refused"]
