"""The benchmarks' machinery and shape; never their timings."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from bench_arguments import arguments
from harness import clean_environment
from launcher_variables import HOROVODRUN

from hvdtrain.bench import train
from hvdtrain.bench.train import WAYS, Way
from hvdtrain.bench.turns import turns
from hvdtrain.bench.turns.turns import InterleavedJobs
from hvdtrain.core.errors import ConfigError, LauncherError
from hvdtrain.record import stats


def test_ratio_of_pairs_is_blind_to_a_slow_while() -> None:
    base = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 5.0, 6.0]  # the machine was busy in the last two
    ratio = stats.ratio_of_medians([2 * value for value in base], base)
    assert ratio.value == ratio.low == ratio.high == 2.0
    loose = stats.ratio_of_medians([2 * value for value in base], sorted(base))
    assert loose.low < 2.0 < loose.high  # the negative twin: not of the same time, it shows


def test_everyone_comes_once_a_round_and_another_one_first() -> None:
    rounds = [stats.rotated({"a": 1, "b": 2, "c": 3}, turn) for turn in range(4)]
    assert ["".join(names) for names in rounds] == ["abc", "bca", "cab", "abc"]
    assert stats.rotated([], 3) == []


def test_place_for_the_result_is_checked_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--out"):
        train.run(arguments("--out", str(tmp_path / "file" / "x.json")))


def test_not_below_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in HOROVODRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="starts its own ranks"):
        train.run(arguments())


def test_only_the_benchs_own_jobs_may_connect() -> None:
    """Orders are pickled: an address needs the key."""
    with InterleavedJobs(clean_environment()) as jobs:
        assert oct(os.stat(jobs._folder.name).st_mode & 0o777) == "0o700"


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


def result_of(groups: Sequence[Mapping[str, list[float]]], ways: Sequence[Way], *, every: bool) -> dict[str, Any]:
    part = {
        "ranks": 2, "seconds": groups, "cpu_seconds": groups, "memory_bytes": {way.label: 3 << 20 for way in ways},
        "lines": {way.label: 7 for way in ways}, "ratios": {way.label: train.ratios(way, groups, 2) for way in ways},
    }  # fmt: skip
    settings = {"per_rank_batch": 4, "pixels": 32, "device": "cpu", "blocks": 3, "steps": 1, "ranks": 2, "all": every}
    return {"models": {"tiny": part}, "settings": settings, "machine": stats.machine(), "load_after": 0.0}


@pytest.mark.parametrize("at_once", [1, 5, 7, 11, 20, 99])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_group_fits_and_has_its_references(at_once: int, ranks: int) -> None:
    groups = train.grouped(WAYS, ranks, at_once)
    others = [way for group in groups for way in group if way.label not in (way.alone, way.apart)]
    assert others == [way for way in WAYS if way.label not in (way.alone, way.apart)], "each once, in order"
    for group in groups:
        (family,) = {way.family for way in group}
        assert [way.label for way in group[:2]] == [f"{family}, {train.ALONE}", f"{family}, {train.APART}"]
        assert len(group) == 3 or sum(way.processes or ranks for way in group) <= at_once
    assert train.grouped([], ranks, at_once) == []


def test_as_many_ways_as_fit_are_in_a_group() -> None:
    assert [len(group) for group in train.grouped(WAYS, 2, 99)] == [10, 3, 3]
    assert [len(group) for group in train.grouped(WAYS, 2, 9)] == [6, 5, 3, 3, 3]


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


def test_report_of_all_says_what_is_compared_with_what(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = (ALONE, APART, OTHER, FAR)
    monkeypatch.setattr(train, "WAYS", ways)
    text = train.report(result_of(GROUPS, ways, every=True))
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert rows["far"][1:4] == ["2", "4000.00", "ms"] and rows["far"][-3:] == ["3", "MiB", "7"]
    assert rows[APART.label][6:8] == ["1,", "2"], "in both groups"
    assert "0.625 [0.625, 0.625]" in text and "in the same rounds of the same group" in text


def test_report_has_ratios_to_hvdtrain_and_to_one_process() -> None:
    ways = [way for way in train.STEPS if not way.keras and way.arm not in train.NEEDS]
    seconds = dict(zip((way.label for way in ways), ([1.0] * 2, [0.9] * 2, [1.0] * 2, [1.2] * 2, [1.5] * 2, [1.1] * 2),
                       strict=True))  # fmt: skip
    text = train.report(result_of([seconds], ways, every=False))
    rows = {line.split("  ")[0]: [cell.strip() for cell in line.split("  ") if cell] for line in text.splitlines()}
    assert rows["PyTorch, one process"][4:] == ["1.000 [1.000, 1.000]", "1"], "hvdtrain's in one process, over plain"
    ours = ["1200.00 ms", "6.7", "1200.00 ms", "1", "1.667 [1.667, 1.667]", "0.750 [0.750, 0.750]"]
    assert rows["hvdtrain on Horovod"][1:] == ours
    assert rows["DistributedDataParallel"][4] == "1.091 [1.091, 1.091]"
    assert "in the same rounds of the same group" not in text


def test_changed_lines() -> None:
    by_label = {way.label: train.changed_lines(way) for way in WAYS}
    assert all((by_label[way.label] == 0) == (way.label in (way.alone, way.apart)) for way in WAYS)
    # init_process_group and the wrapper with their imports, and the loop that calls the wrapper
    assert by_label["DistributedDataParallel"] == 5


def test_ways_that_are_left_out_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments("--all", "--models", "resnet18")
    there = [way for way in WAYS if train._is_there(way, args, "resnet18")]
    said = capsys.readouterr().err
    assert not any(way.keras for way in there) and said.count("Keras has no resnet18; of what both have: resnet50") == 6
    assert not train._is_there(dataclasses.replace(OTHER, keras="torch"), arguments("--device=cuda"), "toy")
    args = arguments("--all", "--framework=keras", "--backend=torch")
    assert {way.family for way in WAYS if train._is_wanted(way, args)} == {"Keras on torch"}


@pytest.mark.parametrize("flags", [("--ranks=1",), ("--models", "resnet18", "resnet50")])
def test_one_model_on_several_ranks(flags: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--all needs at least 2 ranks and exactly one model"):
        train.run(arguments("--all", *flags, "--out", str(tmp_path / "x.json")))


def test_nothing_to_measure_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments("--framework=keras", "--backend=tensorflow", "--per-rank-batch=1", "--steps=1")
    with pytest.raises(ConfigError, match="a way to train the model here"):
        train.measure(args, "resnet18")
    assert "Keras has no resnet18" in capsys.readouterr().err
