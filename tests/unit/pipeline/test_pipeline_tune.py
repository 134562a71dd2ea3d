"""Tuning: the search finds the fastest by few runs, says how sure it is, and refuses a split that does not pay."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import pytest

from hvdtrain.pipeline.tuning import search_size
from hvdtrain.pipeline.tuning.search import Search, climb, race_in_turns
from hvdtrain.pipeline.tuning.search_size import REFERENCE
from hvdtrain.record.stats import ratio_of_medians

CANDIDATES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]


def step_time(count: int, *, overhead_s: float, stages: int = 2, batch: int = 32) -> float:
    """A step of equal stages: each pass costs its share of the work, and something besides."""
    return (count + stages - 1) * (overhead_s + 1.0 * batch / count / batch)


class Machine:
    """Seconds of steps, with noise and a mood that changes; counts what it ran."""

    def __init__(self, true: Callable[[int], float], *, noise: float = 0.01, seed: int = 0, moody: bool = True) -> None:
        self.true, self.noise, self.moody = true, noise, moody
        self.random = random.Random(seed)
        self.mood, self.runs, self.spent_s = 1.0, 0, 0.0

    def __call__(self, count: int) -> float:
        self.runs += 1
        if self.moody:
            self.mood = min(1.5, max(1.0, self.mood * self.random.uniform(0.97, 1.03)))
        seconds = self.true(count) * self.mood * self.random.gauss(1, self.noise)
        self.spent_s += seconds
        return seconds


def search_of(run: Callable[[int], float], budget_s: float = math.inf, clock: Callable[[], float] | None = None) -> Any:
    return Search(partial(race_in_turns, run), budget_s, clock=clock or (lambda: 0.0))


def fastest(run: Callable[[int], float], predicted: dict[int, float]) -> tuple[int, bool]:
    return climb(search_of(run), min(predicted, key=predicted.__getitem__), predicted, search_size.ROUNDS)


# ---- the search


@pytest.mark.parametrize("overhead_s", [0.001, 0.02, 0.1, 0.4])
@pytest.mark.parametrize("seed", range(5))
def test_finds_the_fastest_by_few_runs(overhead_s: float, seed: int) -> None:
    def true(count: int) -> float:
        return step_time(count, overhead_s=overhead_s)

    machine = Machine(true, seed=seed)
    best, _ = fastest(machine, {count: true(count) for count in CANDIDATES})
    assert true(best) <= 1.03 * min(map(true, CANDIDATES))
    assert machine.runs <= 10 * len(CANDIDATES) / 3, "a third of 10 repeats of each"


@pytest.mark.parametrize("believed_s", [0.0001, 0.5])
def test_a_prediction_that_is_off_costs_rounds_only(believed_s: float) -> None:
    def true(count: int) -> float:
        return step_time(count, overhead_s=0.03)

    wrong = {count: step_time(count, overhead_s=believed_s) for count in CANDIDATES}
    assert true(min(wrong, key=wrong.__getitem__)) > 1.2 * min(map(true, CANDIDATES)), "the twin: believed, it is bad"
    assert true(fastest(Machine(true), wrong)[0]) <= 1.03 * min(map(true, CANDIDATES))


def test_one_quick_run_makes_no_winner() -> None:
    true = {2: 1.04, 4: 1.0, 8: 1.06}
    lucky = iter([1.04, 0.93])

    def run(count: int) -> float:
        return next(lucky, true[2]) if count == 2 else true[count]

    clock = itertools.count()
    search = search_of(run, budget_s=1.0, clock=lambda: next(clock))
    assert climb(search, 4, true, search_size.ROUNDS) == (4, False)
    assert next(clock) < 6, "time was up after a round"


def test_a_challenger_that_cannot_be_run_is_thrown_out() -> None:
    assert fastest(lambda count: math.inf if count > 4 else 8.0 / count, {n: float(n != 4) for n in CANDIDATES})[0] == 4
    verdict = search_of(lambda count: math.inf if count == 2 else 1.0).compared(1, 2, search_size.ROUNDS)
    assert verdict == ("thrown out: it cannot be run", None)


@pytest.mark.parametrize(("reference_s", "outcome", "runs"), [(0.5, "faster", 5), (2.0, "slower", 2)])
def test_another_is_compared_in_no_more_rounds_than_it_takes(reference_s: float, outcome: str, runs: int) -> None:
    machine = Machine(lambda count: reference_s if count == REFERENCE else 1.0)
    verdict = search_of(machine).compared(4, REFERENCE, search_size.ROUNDS)
    assert verdict.outcome == outcome and verdict.ratio.value == pytest.approx(reference_s, rel=0.1)
    assert machine.runs == 1 + 2 * runs


# ---- what it says


def result(best_s: list[float], alone_s: list[float], one_device: str) -> search_size.Tuning:
    trials = [
        search_size.Trial(count, 32 // count, tuple(seconds), median(seconds), 1.0)
        for count, seconds in ((2, [9.0, 9.1]), (4, best_s))
    ]
    ratio = ratio_of_medians(best_s, alone_s) if alone_s else None
    return search_size.Tuning(32, tuple(trials), trials[1], {2: 9.5, 4: 1.0, 8: 1.2}, tuple(alone_s),
                         "cpu with 2 threads", ratio, one_device, True, {32: "no memory"}, 3.0)  # fmt: skip


def test_verdicts_have_the_numbers() -> None:
    pays = result([1.0, 1.01, 0.99], [2.0, 2.02, 1.99], "slower")
    assert pays.split_pays and pays.verdict.startswith("split, split size 8 (4 micro-batches): 1 s a step")
    assert "2 s on cpu with 2 threads alone" in pays.verdict
    lost = result([3.0, 3.01, 2.99], [2.0, 2.02, 1.99], "faster")
    assert not lost.split_pays and lost.verdict.startswith("do not split: one device is faster and the model fits")
    assert "1.49" in lost.verdict and "3 s a step" in lost.verdict
    even = result([2.0, 2.1, 1.9], [2.0, 1.9, 2.1], "within the noise")
    assert not even.split_pays and even.verdict.startswith("no gain from splitting that could be shown")
    assert lost.one_is_faster and not even.one_is_faster and not pays.one_is_faster
    alone = result([2.0, 2.1, 1.9], [], "")
    assert alone.split_pays and "does not fit on one device" in alone.verdict


@pytest.mark.parametrize("batch", [1, 2, 3, 10, 31, 32, 120])
def test_default_candidates(batch: int) -> None:
    counts = search_size._counts(None, batch)
    assert counts[0] == 1 and counts == sorted(set(counts)) and counts[-1] <= batch
    assert all(b / a <= 2 for a, b in zip(counts, counts[1:], strict=False)) and batch / counts[-1] < 1.5
