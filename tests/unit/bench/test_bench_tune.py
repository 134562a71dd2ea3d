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
from hvdtrain.bench.tune import Knob, Settings, Tuned
from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.tuning.search import Refused, Search

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

    def find(self, start: Settings, knobs: list[Knob] = KNOBS, budget_s: float = 1e6) -> Tuned:
        search = Search(self.race, budget_s, tune.MARGIN, clock=lambda: self.now_s)
        return tune.find(search, start, knobs, progress=lambda text: None)


@given(
    st.fixed_dictionaries({name: st.sampled_from([0.2, 0.9, 0.97, 0.99, 1.0, 1.01, 1.03, 1.5, -1.0])
                           for name in ("A2", "A3", "Bx", "By")}),
    st.sampled_from([0.0, 0.05, 0.3]), st.integers(0, 10**6), st.sampled_from([30.0, 100.0, 1e6]),
)  # fmt: skip
def test_it_never_ends_slower_than_it_began(costs: dict[str, float], noise: float, seed: int, budget_s: float) -> None:
    machine = MadeUp(costs, noise, seed)
    found = machine.find({}, budget_s=budget_s)
    assert machine.cost(found.settings) <= 1.0, found
    assert (found.ratio is None) == (found.settings == {}) == (found.verdict != "faster")
    # a round that has begun is finished
    assert machine.now_s <= budget_s + START_S + 2 * 1.5 * 1.5 * 1.3


@given(st.sampled_from([1.3, 3.0, 100.0]), st.sampled_from([0.0, 0.02]), st.integers(0, 10**6))
def test_a_bad_setting_is_found(slower: float, noise: float, seed: int) -> None:
    """Whichever knob it is, and whether its own variable or the usual value is what is better."""
    machine = MadeUp({"A7": slower, "B9": slower}, noise, seed)
    found = machine.find({"A": "7", "B": "9"})
    settings = found.settings
    assert machine.cost(settings) == 1.0 and settings["A"] in ("1", "2", "3") and settings["B"] == settings["B2"]
    assert found.ratio is not None and found.ratio.high < 1 - tune.MARGIN


def test_what_is_not_beyond_noise_is_not_kept() -> None:
    machine = MadeUp({"A2": 0.97}, 0.3)
    found = machine.find({})
    assert found.settings == {}
    assert {trial["outcome"] for trial in found.trials} <= {"not faster", "within the noise", "slower"}


def test_a_little_faster_than_the_margin_is_not_worth_a_file() -> None:
    assert MadeUp({"A2": 1 - tune.MARGIN / 2}, 0.0).find({}).settings == {}
    assert MadeUp({"A2": 1 - tune.MARGIN * 2}, 0.0).find({}).settings == {"A": "2"}


def test_a_winner_that_fresh_turns_do_not_confirm_is_dropped() -> None:
    """It was fast as long as it was tried; fresh turns come last, against the start."""
    machine = MadeUp({"A2": 0.5}, 0.0)
    race = machine.race

    def fickle(best: Settings, candidate: Settings) -> Iterator[tuple[float, float]]:
        machine.costs["A2"] = 0.5 if len(machine.raced) < 4 else 1.0
        return race(best, candidate)

    machine.race = fickle  # type: ignore[method-assign]
    found = machine.find({})
    assert machine.raced[-1] == {"A": "2"} and (found.settings, found.ratio) == ({}, None)
    assert "in fresh turns" in found.verdict


def test_a_candidate_that_is_clearly_slower_gets_two_rounds() -> None:
    machine = MadeUp({"A2": 2.0}, 0.0)
    found = machine.find({}, [Knob("a", ["A"], ["2"], "1")])
    assert found.trials[0]["outcome"] == "slower" and machine.now_s == START_S + 2 * 3.0


def test_what_there_was_no_time_for_is_named() -> None:
    found = MadeUp({}, 0.0).find({}, budget_s=40.0)
    assert found.settings == {} and len(found.trials) + len(found.untried) == 4 and found.untried[-1] == "b y"
    late = MadeUp({}, 0.0)
    search = Search(late.race, 20.0, tune.MARGIN, clock=lambda: late.now_s)
    late.now_s = 15.0
    said = tune.find(search, {}, KNOBS, progress=lambda text: None).verdict
    assert said == "nothing was tried: --budget is too short"


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
    with pytest.raises(ConfigError, match="--tune needs at least 2 ranks"):
        command("--tune", "-np", "1")
    with pytest.raises(ConfigError, match="a command after -- needs --tune"):
        train.run(arguments("--", "python", "train.py"))
