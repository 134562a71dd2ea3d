"""`hvdtrain bench train --all`: which ways take turns, and the arithmetic of what is said of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from bench_arguments import arguments

from hvdtrain.bench import compared, torch_job, train
from hvdtrain.bench.compared import WAYS, Way
from hvdtrain.core.errors import ConfigError
from hvdtrain.record import stats

ALONE, APART, OTHER, FAR = (Way(f"PyTorch, {compared.ALONE}", "alone", 1), Way(f"PyTorch, {compared.APART}", "alone"),
                            Way("other", "ddp"), Way("far", "fabric"))  # fmt: skip
# the machine was half as fast while the second group ran: what it measures alone shows that
GROUPS = [
    {ALONE.label: [1.0, 1.0, 1.1], APART.label: [1.25, 1.25, 1.375], OTHER.label: [2.0, 2.0, 2.2]},
    {ALONE.label: [2.0, 2.0, 2.2], APART.label: [2.5, 2.5, 2.75], FAR.label: [4.0, 4.0, 4.4]},
]


@pytest.mark.parametrize("at_once", [1, 5, 7, 11, 20, 99])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_group_fits_and_has_its_references(at_once: int, ranks: int) -> None:
    groups = compared.grouped(WAYS, ranks, at_once)
    others = [way for group in groups for way in group if way.label not in (way.alone, way.apart)]
    assert others == [way for way in WAYS if way.label not in (way.alone, way.apart)], "each once, in order"
    for group in groups:
        (family,) = {way.family for way in group}
        assert [way.label for way in group[:2]] == [f"{family}, {compared.ALONE}", f"{family}, {compared.APART}"]
        assert len(group) == 3 or sum(way.processes or ranks for way in group) <= at_once
    assert compared.grouped([], ranks, at_once) == []


def test_as_many_ways_as_fit_are_in_a_group() -> None:
    assert [len(group) for group in compared.grouped(WAYS, 2, 99)] == [10, 3, 3]
    assert [len(group) for group in compared.grouped(WAYS, 2, 9)] == [6, 5, 3, 3, 3]


def test_ratios_are_of_the_same_group() -> None:
    other, far = (compared.ratios(way, GROUPS, 2) for way in (OTHER, FAR))
    for ratio in (other, far):
        assert ratio["speedup"]["value"] == pytest.approx(2 * 1 / 2) and ratio["efficiency"]["value"] == 1.25 / 2
    assert compared.ratios(APART, GROUPS, 2)["speedup"]["value"] == pytest.approx(2 * 1 / 1.25)
    assert compared.ratios(APART, GROUPS, 2)["efficiency"]["value"] == 1
    assert compared.ratios(ALONE, GROUPS, 2) == {"speedup": {"value": 1, "low": 1, "high": 1}}


def test_report_says_what_is_compared_with_what() -> None:
    ways = (ALONE, APART, OTHER, FAR)
    part = {
        "ranks": 2, "model": "tiny", "groups": GROUPS, "memory_bytes": {way.label: 3 << 20 for way in ways},
        "lines": {way.label: 7 for way in ways}, "ratios": {way.label: compared.ratios(way, GROUPS, 2) for way in ways},
    }  # fmt: skip
    settings = {"per_rank_batch": 4, "pixels": 32, "device": "cpu", "blocks": 3, "steps": 1}
    result = {"compared": part, "settings": settings, "machine": stats.machine(), "load_after": 0.0}
    text = compared.report(result)
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert rows["far"][1:4] == ["2", "4000.00", "ms"] and rows["far"][-3:] == ["3", "MiB", "7"]
    assert rows[APART.label][6:8] == ["1,", "2"], "in both groups"
    assert "0.625 [0.625, 0.625]" in text and "in the same rounds of the same group" in text


def test_changed_lines() -> None:
    by_label = {way.label: compared.changed_lines(way) for way in WAYS}
    assert all((by_label[way.label] == 0) == (way.label in (way.alone, way.apart)) for way in WAYS)
    # init_process_group and the wrapper with their imports, and the loop that calls the wrapper
    assert by_label["DistributedDataParallel"] == 5


def test_changed_lines_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"alone": ["a", "b", "c"], "ddp": ["a", "x", "c", "d"], "fabric": ["c"]}
    monkeypatch.setattr(torch_job, "ARMS", {name: name for name in texts})
    monkeypatch.setattr(compared, "_lines", texts.__getitem__)
    assert [compared.changed_lines(way) for way in (ALONE, OTHER, FAR)] == [0, 2, 2]


def test_ways_that_are_left_out_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments("--all", "--models", "resnet18")
    there = [way for way in WAYS if compared._is_there(way, args)]
    said = capsys.readouterr().err
    assert not any(way.keras for way in there) and said.count("Keras has no resnet18; of what both have: resnet50") == 6
    assert not compared._is_there(dataclasses.replace(OTHER, keras="torch"), arguments("--models=toy", "--device=cuda"))
    args = arguments("--all", "--framework=keras", "--backend=torch")
    assert {way.family for way in WAYS if compared._is_wanted(way, args)} == {"Keras on torch"}


@pytest.mark.parametrize("flags", [("--ranks=1",), ("--models", "resnet18", "resnet50")])
def test_one_model_on_several_ranks(flags: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--all compares ways to train one model on several ranks"):
        train.run(arguments("--all", *flags, "--out", str(tmp_path / "x.json")))


def test_free_memory_says_how_many_processes() -> None:
    assert 0 <= compared.processes_that_fit() < 10_000
