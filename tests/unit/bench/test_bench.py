"""The benchmarks' machinery and shape; never their timings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bench_arguments import arguments
from launcher_variables import HOROVODRUN

from hvdtrain.bench import train
from hvdtrain.bench.train import WAYS, Way
from hvdtrain.bench.turns import turns
from hvdtrain.core.errors import ConfigError, LauncherError
from hvdtrain.record import stats


def test_ratio_of_pairs_is_blind_to_a_slow_while() -> None:
    base = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 5.0, 6.0]  # the machine was busy in the last two
    ratio = stats.ratio_of_medians([2 * value for value in base], base)
    assert ratio.value == ratio.low == ratio.high == 2.0
    loose = stats.ratio_of_medians([2 * value for value in base], sorted(base))
    assert loose.low < 2.0 < loose.high  # the negative twin: not of the same time, it shows


def test_place_for_the_result_is_checked_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--out"):
        train.run(arguments("--out", str(tmp_path / "file" / "x.json")))


def test_not_below_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in HOROVODRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="starts its own ranks"):
        train.run(arguments())


def test_missing_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LauncherError, match="build-horovod"):
        turns.launched(2, "horovodrun")
    assert turns.launched(1, "horovodrun") == []


# ---- which ways take turns, and the arithmetic of what is printed of them

ALONE, APART, OTHER, FAR = (Way(f"PyTorch, {train.ALONE}", "alone", 1), Way(f"PyTorch, {train.APART}", "alone"),
                            Way("other", "ddp"), Way("far", "fabric"))  # fmt: skip
# the machine was half as fast while the second group ran: what it measures alone shows that
GROUPS = [
    {ALONE.label: [1.0, 1.0, 1.1], APART.label: [1.25, 1.25, 1.375], OTHER.label: [2.0, 2.0, 2.2]},
    {ALONE.label: [2.0, 2.0, 2.2], APART.label: [2.5, 2.5, 2.75], FAR.label: [4.0, 4.0, 4.4]},
]


@pytest.mark.parametrize("at_once", [1, 5, 7, 11, 20, 99])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_group_fits_and_has_its_references(at_once: int, ranks: int) -> None:
    groups = train.grouped(WAYS, ranks, at_once)
    others = [way for group in groups for way in group if not way.is_reference]
    assert others == [way for way in WAYS if not way.is_reference], "each once, in order"
    for group in groups:
        (family,) = {way.family for way in group}
        assert [way.label for way in group[:2]] == [f"{family}, {train.ALONE}", f"{family}, {train.APART}"]
        assert {way.ours for way in group} == {way.label for way in group[2:4]}
        assert len(group) <= 5 or sum(way.processes or ranks for way in group) <= at_once
    assert train.grouped([], ranks, at_once) == []


def test_ratios_are_of_the_same_group() -> None:
    other, far = (train.ratios(way, GROUPS, 2) for way in (OTHER, FAR))
    for ratio in (other, far):
        assert ratio["speedup"]["value"] == pytest.approx(2 * 1 / 2) and ratio["efficiency"]["value"] == 1.25 / 2
    assert train.ratios(APART, GROUPS, 2)["speedup"]["value"] == pytest.approx(2 * 1 / 1.25)
    assert train.ratios(APART, GROUPS, 2)["efficiency"]["value"] == 1
    assert train.ratios(ALONE, GROUPS, 2) == {}, "the reference"
    ours = Way("hvdtrain on Horovod", "hvdtrain")
    groups = [GROUPS[0], GROUPS[1] | {ours.label: [1.0, 1.0, 1.1]}]
    assert "ours" not in train.ratios(OTHER, groups, 2), "not in one group"
    assert train.ratios(FAR, groups, 2)["ours"]["value"] == 0.25


@pytest.mark.parametrize("flags", [("--ranks=1",), ("--models", "resnet18", "resnet50")])
def test_one_model_on_several_ranks(flags: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--all needs at least 2 ranks and exactly one model"):
        train.run(arguments("--all", *flags, "--out", str(tmp_path / "x.json")))
