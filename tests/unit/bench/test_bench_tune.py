"""The search of `hvdtrain bench train --tune`, over made-up costs; never over times."""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator

import pytest
from bench_arguments import arguments
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.bench import train, tune
from hvdtrain.bench.tune import Knob, KnobSearch, Refused, Settings
from hvdtrain.core.errors import ConfigError

KNOBS = [Knob("a", ["A"], ["1", "2", "3"], "1"), Knob("b", ["B", "B2"], ["x", "y"])]
START_S = 5.0  # of a job


class MadeUp:
    """A machine on which a setting costs what it costs, with noise; time passes only as it works."""

    def __init__(self, costs: dict[str, float], noise: float, seed: int = 0) -> None:
        self.costs, self.noise, self.now_s = costs, noise, 0.0
        self.draw = random.Random(seed)
        self.raced: list[Settings] = []

    def cost(self, settings: Settings) -> float:
        seconds = 1.0
        for name, usual in (("A", "1"), ("B", "unset")):
            seconds *= self.costs.get(name + settings.get(name, usual), 1.0)
        return seconds

    def race(self, best: Settings, candidate: Settings) -> Iterator[tuple[float, float]]:
        self.raced.append(candidate)
        self.now_s += START_S
        if self.cost(candidate) < 0:
            raise Refused("it ended with 1")
        while True:
            pair = [self.cost(its) * (1 + self.noise * self.draw.uniform(-1, 1)) for its in (best, candidate)]
            self.now_s += sum(pair)
            yield pair[0], pair[1]

    def search(self, budget_s: float = 1e6) -> KnobSearch:
        return KnobSearch(self.race, budget_s, clock=lambda: self.now_s, say=lambda text: None)


@given(
    st.fixed_dictionaries({name: st.sampled_from([0.2, 0.9, 0.97, 0.99, 1.0, 1.01, 1.03, 1.5, -1.0])
                           for name in ("A2", "A3", "Bx", "By")}),
    st.sampled_from([0.0, 0.05, 0.3]), st.integers(0, 10**6), st.sampled_from([30.0, 100.0, 1e6]),
)  # fmt: skip
def test_it_never_ends_slower_than_it_began(costs: dict[str, float], noise: float, seed: int, budget_s: float) -> None:
    machine = MadeUp(costs, noise, seed)
    found, ratio, verdict = machine.search(budget_s).find({}, KNOBS)
    assert machine.cost(found) <= 1.0, (found, ratio, verdict)
    assert (ratio is None) == (found == {}) == (verdict != "faster")
    # a round that has begun is finished
    assert machine.now_s <= budget_s + START_S + 2 * 1.5 * 1.5 * 1.3


@given(st.sampled_from([1.3, 3.0, 100.0]), st.sampled_from([0.0, 0.02]), st.integers(0, 10**6))
def test_a_bad_setting_is_found(slower: float, noise: float, seed: int) -> None:
    """Whichever knob it is, and whether its own variable or the usual value is what is better."""
    machine = MadeUp({"A7": slower, "B9": slower}, noise, seed)
    found, ratio, _ = machine.search().find({"A": "7", "B": "9"}, KNOBS)
    assert machine.cost(found) == 1.0 and found["A"] in ("1", "2", "3") and found["B"] == found["B2"]
    assert ratio is not None and ratio.high < 1 - tune.MARGIN


def test_what_is_not_beyond_noise_is_not_kept() -> None:
    machine = MadeUp({"A2": 0.97}, 0.3)
    search = machine.search()
    assert search.find({}, KNOBS)[0] == {}
    assert {trial["outcome"] for trial in search.trials} <= {"not faster", "within the noise", "slower"}


def test_a_little_faster_than_the_margin_is_not_worth_a_file() -> None:
    assert MadeUp({"A2": 1 - tune.MARGIN / 2}, 0.0).search().find({}, KNOBS)[0] == {}
    assert MadeUp({"A2": 1 - tune.MARGIN * 2}, 0.0).search().find({}, KNOBS)[0] == {"A": "2"}


def test_a_winner_that_fresh_turns_do_not_confirm_is_dropped() -> None:
    """It was fast as long as it was tried; fresh turns come last, against the start."""
    machine = MadeUp({"A2": 0.5}, 0.0)
    race = machine.race

    def fickle(best: Settings, candidate: Settings) -> Iterator[tuple[float, float]]:
        machine.costs["A2"] = 0.5 if len(machine.raced) < 4 else 1.0
        return race(best, candidate)

    search = machine.search()
    search.race = fickle
    found, ratio, verdict = search.find({}, KNOBS)
    assert machine.raced[-1] == {"A": "2"} and (found, ratio) == ({}, None)
    assert "in fresh turns" in verdict


def test_a_candidate_that_cannot_be_used_is_said_so() -> None:
    search = MadeUp({"A2": -1.0, "A3": 0.5}, 0.0).search()
    assert search.find({}, KNOBS)[0] == {"A": "3"}
    assert search.trials[0]["outcome"] == "thrown out: it ended with 1"


def test_a_candidate_that_is_clearly_slower_gets_two_rounds() -> None:
    machine = MadeUp({"A2": 2.0}, 0.0)
    search = machine.search()
    search.find({}, [Knob("a", ["A"], ["2"], "1")])
    assert search.trials[0]["outcome"] == "slower" and machine.now_s == START_S + 2 * 3.0


def test_what_there_was_no_time_for_is_named() -> None:
    search = MadeUp({}, 0.0).search(40.0)
    assert search.find({}, KNOBS)[0] == {}
    assert len(search.trials) + len(search.untried) == 4 and search.untried[-1] == "b y"
    late = MadeUp({}, 0.0)
    search = late.search(20.0)
    late.now_s = 15.0
    assert search.find({}, KNOBS)[2] == "nothing was tried: --budget is too short"


def test_distance() -> None:
    assert tune.distance([1.0, 2.0], [1.0, 2.0]) == 0.0 == tune.distance([0.0], [0.0])
    assert tune.distance([1.1, 0.0], [1.0, 0.0]) == pytest.approx(0.1)
    far = ([float("nan"), 0.0], [1.0], [1e300, 0.0])
    assert all(tune.distance(moved, [1.0, 0.0]) > tune.SAME for moved in far)
    assert tune.distance([1.0], [0.0]) > tune.SAME


@pytest.mark.parametrize(("what", "fusion", "buckets"), [("torch cpu", "0", True), ("keras", None, False)])
def test_knobs(what: str, fusion: str | None, buckets: bool) -> None:
    knobs = tune.knobs_of(what, 2, 8, launchers=["horovodrun"], compression=False)
    names = {variable: knob for knob in knobs for variable in knob.variables}
    assert names["OMP_NUM_THREADS"].values == ["4", "1", "8"]
    assert names["HOROVOD_FUSION_THRESHOLD"].usual == fusion and ("HVDTRAIN_BUCKET_BYTES" in names) == buckets
    assert not {"HVDTRAIN_COMPRESSION", tune.LAUNCHER} & set(names), "compression changes results: on request only"
    more = tune.knobs_of(what, 2, 8, launchers=["horovodrun", "mpirun"], compression=True)
    assert [knob.variables for knob in more[len(knobs) :]] == [[tune.LAUNCHER], ["HVDTRAIN_COMPRESSION"]]


def test_what_is_tuned() -> None:
    def command(*flags: str) -> list[str]:
        args: argparse.Namespace = arguments(*flags)
        for name, value in train.DEFAULTS["torch"].items():
            setattr(args, name, getattr(args, name) or value)
        return tune._command(args)

    assert command("--tune", "-np", "2", "--", "python", "train.py", "--lr", "1") == ["python", "train.py", "--lr", "1"]
    assert "hvdtrain.keras_mnist" in command("--tune", "--framework", "keras")
    assert [*itertools.pairwise(command("--tune", "--models", "resnet50"))].count(("--model", "resnet50")) == 1
    with pytest.raises(ConfigError, match="what ranks do together"):
        command("--tune", "-np", "1")
    with pytest.raises(ConfigError, match="a command is what --tune tunes"):
        train.run(arguments("--", "python", "train.py"))
