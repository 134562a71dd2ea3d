"""The benchmarks' machinery and shape; never their timings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from bench_arguments import arguments

from hvdtrain.bench import train
from hvdtrain.bench.turns import turns
from hvdtrain.core.errors import ConfigError, LauncherError
from hvdtrain.record import stats


def test_ratio_of_pairs_is_blind_to_a_slow_while() -> None:
    base = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 5.0, 6.0]  # the machine was busy in the last two
    ratio = stats.ratio_of_medians([2 * value for value in base], base)
    assert ratio.value == ratio.low == ratio.high == 2.0
    loose = stats.ratio_of_medians([2 * value for value in base], sorted(base))
    assert loose.low < 2.0 < loose.high  # the negative twin: not of the same time, it shows


def test_ratio_interval_holds_the_value_and_repeats() -> None:
    above, below = [1.0, 1.2, 1.4, 1.1], [1.0, 0.8, 1.0, 1.1]
    ratio = stats.ratio_of_medians(above, below)
    assert ratio.low <= ratio.value <= ratio.high and ratio.value == pytest.approx(1.2)
    assert ratio == stats.ratio_of_medians(above, below)


def test_everyone_comes_once_a_round_and_another_one_first() -> None:
    rounds = [stats.rotated({"a": 1, "b": 2, "c": 3}, turn) for turn in range(4)]
    assert ["".join(names) for names in rounds] == ["abc", "bca", "cab", "abc"]
    assert stats.rotated([], 3) == []


def test_table_is_aligned() -> None:
    text = stats.table([("what", "ms"), ("short", "1.00"), ("a longer one", "12.00")])
    lines = text.splitlines()
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1
    assert lines[2].startswith("short ") and lines[2].endswith(" 1.00")


def test_place_for_the_result_is_checked_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--out"):
        train.run(arguments("--out", str(tmp_path / "file" / "x.json")))


def test_not_below_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": 0,
        "SIZE": 2,
        "LOCAL_RANK": 0,
        "LOCAL_SIZE": 2,
        "CROSS_RANK": 0,
        "CROSS_SIZE": 1,
    }.items():
        monkeypatch.setenv(f"HOROVOD_{name}", str(value))
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "1")
    monkeypatch.setenv("HOROVOD_CONTROLLER", "gloo")
    with pytest.raises(ConfigError, match="starts its own ranks"):
        train.run(arguments())


def test_missing_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LauncherError, match="build-horovod"):
        turns.launched(2, "horovodrun")
    assert turns.launched(1, "horovodrun") == []


def test_torch_report_names_the_fastest_rival_and_the_missed_target() -> None:
    wall = {
        "plain PyTorch, 1 process": [1.0, 1.0], "hvdtrain, 1 process": [1.0, 1.0], "hvdtrain": [1.2, 1.2],
        "horovod": [1.5, 1.5], "ddp": [1.1, 1.1], train.LIMIT: [0.9, 0.9],
    }  # fmt: skip
    part: dict[str, Any] = {"ranks": 2, "seconds_per_step": wall, "cpu_seconds_per_step": wall}
    part |= train.torch_ratios(wall)
    settings = {"per_rank_batch": 4, "pixels": 32, "device": "cpu", "blocks": 2, "steps": 1}
    result = {"models": {"tiny": part}, "settings": settings, "machine": stats.machine(), "load_after": 0.0}
    text = train.torch_report(result)
    assert "fastest hand-written loop (ddp): 1.091 [1.091, 1.091] (target <= 1: MISSED)" in text
    assert "2 processes that do not talk: 0.750 [0.750, 0.750], goal 0.92: not reached" in text
    assert set(part["efficiency"]) == {"hvdtrain", "horovod", "ddp"}
    wall["hvdtrain"] = [1.0, 1.04]
    part.update(train.torch_ratios(wall))
    text = train.torch_report(result)
    assert "(ddp): 0.927 [0.909, 0.945] (target <= 1: kept)" in text and "MISSED" not in text
    wall["hvdtrain"] = [0.9, 1.4]
    part.update(train.torch_ratios(wall))
    assert "(target <= 1: MISSED, within the noise)" in train.torch_report(result)
    wall["hvdtrain"] = [0.95, 0.95]  # the limit, not one process, is what it is held against
    part.update(train.torch_ratios(wall))
    assert "0.947 [0.947, 0.947], goal 0.92: reached" in train.torch_report(result)
