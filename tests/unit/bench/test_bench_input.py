"""The input benchmark's machinery and shape; never its timings."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.bench import input as bench
from hvdtrain.core.errors import ConfigError


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(flags)


def test_the_fewest_workers_that_are_nearly_the_best() -> None:
    rates = {"hvdtrain, 0 workers": [50.0], "hvdtrain, 2 workers": [96.0, 1.0, 97.0], "hvdtrain, 8 workers": [100.0]}
    assert bench.recommend({**rates, "DataLoader, 4 workers": [1000.0]}) == 2
    rates["hvdtrain, 2 workers"] = [90.0]
    assert bench.recommend(rates) == 8


def test_rate_counts_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def batches() -> Iterator[None]:
        nonlocal now
        for number in range(1000):
            now += 9.0 if number < 3 else 0.5  # the first ones are slow: workers start
            yield None

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(bench, "_finish", lambda: None)
    assert bench.rate(batches(), 16, seconds=5.0, warm=3) == 32.0
    assert bench.rate(batches(), 16, seconds=5.0, warm=0) < 20.0  # the negative twin


def test_cores_that_are_not_there(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match=f"at most {len(before)}"):
        bench.run(arguments("--cores", str(len(before) + 1), "--out", str(tmp_path / "x.json")))
    assert os.sched_getaffinity(0) == before
