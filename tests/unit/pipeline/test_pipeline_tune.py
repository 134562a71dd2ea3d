"""Tuning: the search finds the fastest by few runs, says how sure it is, and refuses a split that does not pay."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import Limit

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.tuning import plots, search_size
from hvdtrain.pipeline.tuning.search import REFERENCE, Search
from hvdtrain.record.stats import Interval, mean_of, ratio_of_means, student

CANDIDATES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]


def step_time(count: int, *, overhead_s: float, stages: int = 2, batch: int = 32) -> float:
    """A step of equal stages: each pass costs its share of the work, and something besides."""
    return (count + stages - 1) * (overhead_s + 1.0 * batch / count / batch)


class Machine:
    """Seconds of steps, with noise and a mood that changes; counts what it ran."""

    def __init__(self, true: Callable[[int], float], *, noise: float = 0.01, seed: int = 0) -> None:
        self.true, self.noise = true, noise
        self.random = random.Random(seed)
        self.mood, self.runs, self.spent_s = 1.0, 0, 0.0

    def __call__(self, count: int) -> float:
        self.runs += 1
        self.mood = min(1.5, max(1.0, self.mood * self.random.uniform(0.97, 1.03)))
        seconds = self.true(count) * self.mood * self.random.gauss(1, self.noise)
        self.spent_s += seconds
        return seconds


# ---- intervals


def test_student_is_the_table() -> None:
    table = {(0.95, 1): 12.7062, (0.95, 2): 4.3027, (0.95, 3): 3.1824, (0.95, 9): 2.2622, (0.95, 30): 2.0423,
             (0.99, 4): 4.6041, (0.9, 5): 2.0150}  # fmt: skip
    for (confidence, freedom), value in table.items():
        assert student(confidence, freedom) == pytest.approx(value, abs=1e-3)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    draw = random.Random(3)
    samples = [[draw.gauss(5, 1) for _ in range(5)] for _ in range(2000)]
    held = sum(its.low <= 5 <= its.high for its in (mean_of(one, 0.9) for one in samples))
    assert 0.88 <= held / len(samples) <= 0.92


def test_one_sample_says_nothing_about_its_spread() -> None:
    assert mean_of([2.0], 0.95) == Interval(2.0, -math.inf, math.inf)
    assert ratio_of_means({}, {0: 1.0}, 0.95) is None


def test_ratio_is_blind_to_the_rounds() -> None:
    slow = {0: 1.0, 1: 3.0, 2: 1.5}  # the machine was busy in round 1
    ratio = ratio_of_means({turn: 2 * s for turn, s in slow.items()}, slow, 0.95)
    assert ratio is not None and ratio.low == pytest.approx(2) == ratio.high
    # the negative twin: other rounds' seconds, and it shows
    unpaired = ratio_of_means({0: 2.0, 1: 2.0, 2: 2.0}, slow, 0.95)
    assert unpaired is not None and unpaired.low < 1 < unpaired.high


# ---- the search


@pytest.mark.parametrize("overhead_s", [0.001, 0.02, 0.1, 0.4])
@pytest.mark.parametrize("seed", range(5))
def test_finds_the_fastest_by_few_runs(overhead_s: float, seed: int) -> None:
    def true(count: int) -> float:
        return step_time(count, overhead_s=overhead_s)

    machine = Machine(true, seed=seed)
    best = Search(machine, {count: true(count) for count in CANDIDATES}).find()
    assert true(best) <= 1.03 * min(map(true, CANDIDATES))
    assert machine.runs <= 10 * len(CANDIDATES) / 4, "a quarter of 10 repeats of each"


@pytest.mark.parametrize("believed_s", [0.0001, 0.5])
def test_a_prediction_that_is_off_costs_rounds_only(believed_s: float) -> None:
    def true(count: int) -> float:
        return step_time(count, overhead_s=0.03)

    wrong = {count: step_time(count, overhead_s=believed_s) for count in CANDIDATES}
    assert true(min(wrong, key=wrong.__getitem__)) > 1.2 * min(map(true, CANDIDATES)), "the twin: believed, it is bad"
    assert true(Search(Machine(true), wrong).find()) <= 1.03 * min(map(true, CANDIDATES))


@given(overhead_s=st.floats(0, 2), believed_s=st.floats(0, 2), stages=st.integers(2, 8), seed=st.integers(0, 99))
def test_without_noise_it_is_the_fastest(overhead_s: float, believed_s: float, stages: int, seed: int) -> None:
    def true(count: int) -> float:
        return step_time(count, overhead_s=overhead_s, stages=stages)

    predicted = {count: step_time(count, overhead_s=believed_s, stages=stages) for count in CANDIDATES}
    search = Search(lambda count: true(count), predicted)
    assert true(search.find()) <= 1.0001 * min(map(true, CANDIDATES))
    assert all(len(its) <= 36 for its in search.seconds.values())


def test_says_whether_it_is_settled() -> None:
    clear = Search(Machine(lambda count: 1 + abs(count - 4), noise=0.001), dict.fromkeys(CANDIDATES, 1.0))
    assert clear.find() == 4 and clear.settled
    noisy = Search(Machine(lambda count: 1.0, noise=0.3), dict.fromkeys(CANDIDATES, 1.0))
    noisy.find()
    assert not noisy.settled


def test_what_cannot_be_run_is_not_taken() -> None:
    search = Search(lambda count: math.inf if count < 6 else 1.0 * count, {n: float(n) for n in CANDIDATES})
    assert search.find() == 6
    assert len(search.seconds[4]) == 1, "tried once"
    nothing = Search(lambda count: math.inf, {n: float(n) for n in CANDIDATES})
    assert nothing.seconds[nothing.find()] and set(nothing.seconds) == set(CANDIDATES), "all were tried"


def test_one_quick_run_makes_no_winner() -> None:
    true = {2: 1.04, 4: 1.0, 8: 1.06}
    lucky = iter([0.93])

    def run(count: int) -> float:
        return next(lucky, true[2]) if count == 2 else true[count]

    search = Search(run, true, in_time=lambda seconds: False)
    assert search.find() == 4 and not search.settled
    assert min(search.seconds, key=lambda one: search.seconds[one][0]) == 2, "the twin: by its run, it would"


def test_goes_on_without_time_until_something_runs() -> None:
    search = Search(
        lambda count: math.inf if count > 2 else 1.0, {n: 1.0 / n for n in CANDIDATES}, in_time=lambda s: False
    )
    assert search.find() == 2


def test_stops_when_time_is_up() -> None:
    machine = Machine(lambda count: 1.0, noise=0.3)
    search = Search(machine, dict.fromkeys(CANDIDATES, 1.0), in_time=lambda seconds: machine.spent_s + seconds < 8)
    search.find()
    assert machine.spent_s < 9 and not search.settled


@pytest.mark.parametrize(("reference_s", "faster"), [(0.5, True), (2.0, False)])
def test_compares_with_the_reference_in_the_same_rounds(reference_s: float, faster: bool) -> None:
    machine = Machine(lambda count: reference_s if count == REFERENCE else step_time(count, overhead_s=0.02))
    search = Search(machine, {n: step_time(n, overhead_s=0.02) for n in CANDIDATES}, reference=True)
    best = search.find()
    ratio = search.compared(best, REFERENCE)
    assert ratio is not None and (ratio.low > 1 if faster else ratio.high < 1)
    assert len(search.seconds[REFERENCE]) == 3, "no more rounds than it takes"


# ---- what it says


def result(best_s: list[float], alone_s: list[float]) -> search_size.Tuning:
    trials = []
    for count, seconds in ((2, [9.0, 9.1]), (4, best_s)):
        mean = mean_of(seconds, 0.95)
        trials.append(search_size.Trial(count, 32 // count, tuple(seconds), mean.value, mean.low, mean.high, 1.0))
    ratio = ratio_of_means(dict(enumerate(best_s)), dict(enumerate(alone_s)), 0.95)
    return search_size.Tuning(32, tuple(trials), trials[1], {2: 9.5, 4: 1.0, 8: 1.2}, tuple(alone_s),
                         "cpu with 2 threads", ratio, True, {32: "no memory"}, 0.95, 3.0)  # fmt: skip


def test_verdicts_have_the_numbers(limit: Limit) -> None:
    pays = result([1.0, 1.01, 0.99], [2.0, 2.02, 1.99])
    assert pays.split_pays and pays.verdict.startswith("split, split size 8 (4 micro-batches): 1 s a step")
    assert "2 s on cpu with 2 threads alone" in pays.verdict
    lost = result([3.0, 3.01, 2.99], [2.0, 2.02, 1.99])
    assert not lost.split_pays and lost.verdict.startswith("do not split: one device is faster and the model fits")
    assert "1.49" in lost.verdict and "3 s a step" in lost.verdict
    even = result([2.0, 2.1, 1.9], [2.0, 1.9, 2.1])
    assert not even.split_pays and even.verdict.startswith("no gain from splitting that could be shown")
    assert lost.one_is_faster and not even.one_is_faster and not pays.one_is_faster
    limit("P10d", "`tune(require=True)` with an undecided result", mended="refuses only what is shown to be slower")
    alone = result([2.0, 2.1, 1.9], [])
    assert alone.split_pays and "does not fit on one device" in alone.verdict


def test_result_is_json_and_a_picture() -> None:
    once = result([1.0], [2.0])  # intervals are infinite
    stored = json.loads(json.dumps(once.as_dict(), allow_nan=False))
    assert stored["best"] == 4 and stored["trials"][1]["high"] is None and stored["split_pays"] is False
    picture = once.picture()
    assert picture.best == 8 and picture.predicted == {16: 9.5, 8: 1.0, 4: 1.2}


@pytest.mark.parametrize("batch", [1, 2, 3, 10, 31, 32, 120])
def test_default_candidates(batch: int) -> None:
    counts = search_size._counts(None, batch)
    assert counts[0] == 1 and counts == sorted(set(counts)) and counts[-1] <= batch
    assert all(b / a <= 2 for a, b in zip(counts, counts[1:], strict=False)) and batch / counts[-1] < 1.5


@pytest.mark.parametrize("candidates", [[], [0], [33], [4, -1], [True]])
def test_impossible_candidates(candidates: list[int]) -> None:
    with pytest.raises(ConfigError, match="candidates are numbers of micro-batches"):
        search_size._counts(candidates, 32)


def test_sizes_and_counts() -> None:
    assert [search_size.micro_batches_for(120, size) for size in (1, 7, 20, 120, 200)] == [120, 18, 6, 1, 1]
    assert search_size.split_size(120, 7) == 18


# ---- pictures


@pytest.mark.parametrize("empty", [plots.Bars("t", {}), plots.Bars("t", {"one": []}), plots.Timeline("t", [])])
def test_nothing_to_draw(empty: plots.Bars | plots.Timeline, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="something to draw"):
        plots.plot(empty, tmp_path / "x.png")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="drawn by matplotlib") as caught:
        plots.plot(plots.Bars("t", {"one": [1.0]}), tmp_path / "x.png")
    assert "pip install" in caught.value.remedy and "plot" in caught.value.remedy


# ---- schedules


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"1f1b": 1.0, "gpipe": 1.2, "zb-h1": 0.9}, "zb-h1"),
        ({"1f1b": 1.0, "gpipe": 1.2, "zb-h1": 1.1}, "1f1b"),
        ({"1f1b": 1.0, "gpipe": 0.8, "zb-h1": 0.9}, "gpipe"),
        ({"1f1b": 1.0, "gpipe": 1.0, "zb-h1": math.inf}, "1f1b"),
    ],
)
def test_another_schedule_is_taken_only_if_it_is_faster(seconds: dict[str, float], chosen: str) -> None:
    """Times waver by 4 %; the machine is twice as slow in every other round."""
    pipe, wavers = SimpleNamespace(schedule="1f1b"), itertools.cycle([1.0, 1.02, 0.98, 1.01, 0.99])
    turns = itertools.count()

    def run(count: int) -> float:
        assert count == 4
        return seconds[pipe.schedule] * next(wavers) * (1 + next(turns) // 3 % 2)

    runs: Any = type("Runs", (), {"pipe": pipe, "__call__": staticmethod(run)})()
    assert search_size._schedule(runs, 4, ["gpipe", "zb-h1"], 0.95) == chosen
