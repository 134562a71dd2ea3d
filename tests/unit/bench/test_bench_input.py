"""The input benchmark's machinery and shape; never its timings."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.bench import input as bench
from hvdtrain.bench import keras_input
from hvdtrain.comm.engines import SoloEngine
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.launchers import ALONE
from hvdtrain.record import stats
from hvdtrain.world.world import World


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(flags)


def test_the_fewest_workers_that_are_nearly_the_best() -> None:
    rates = {"hvdtrain, 0 workers": [50.0], "hvdtrain, 2 workers": [96.0, 1.0, 97.0], "hvdtrain, 8 workers": [100.0]}
    assert (
        bench.recommend({**rates, "DataLoader, 4 workers": [1000.0], "hvdtrain, 0 workers, decoded whole": [999.0]})
        == 2
    )
    rates["hvdtrain, 2 workers"] = [90.0]
    assert bench.recommend(rates) == 8


def test_of_keras_the_fewest_workers_and_then_the_shortest_queue() -> None:
    rates = {
        "PyDataset, no workers": [50.0], "PyDataset, 2 threads": [96.0, 1.0, 97.0], "PyDataset, 2 processes": [30.0],
        "PyDataset, 8 threads": [100.0],
    }  # fmt: skip
    assert keras_input.recommend(rates) == ("PyDataset, 2 threads", 96.0)
    queue = "PyDataset, 2 threads, max_queue_size="
    # in a slower minute of the machine: they are compared with each other only
    queues = {f"{queue}2": [60.0], f"{queue}10": [76.0], f"{queue}50": [80.0]}
    assert keras_input.recommend({**rates, **queues}) == (f"{queue}10", 76.0)
    rates["PyDataset, no workers"] = [199.0]
    assert keras_input.recommend({**rates, **queues}) == ("", 199.0)


@pytest.mark.parametrize("devices", [(), (0,)])
def test_pinning_is_tried_where_there_is_a_gpu(devices: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    world = World.on(SoloEngine(devices=devices), ALONE, seed=1, node=0)
    monkeypatch.setattr(bench, "_plain", lambda dataset, batch, workers, world, pin: pin)
    made: Any = bench._data_loaders(None, 8, [0, 2], world)
    assert made == ({
        "DataLoader, 0 workers": True, "DataLoader, 0 workers, pin_memory=False": False,
        "DataLoader, 2 workers": True, "DataLoader, 2 workers, pin_memory=False": False,
    } if devices else {"DataLoader, 0 workers": False, "DataLoader, 2 workers": False})  # fmt: skip


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


def test_report_has_ratios_and_a_number_of_workers() -> None:
    result = {
        "machine": stats.machine(), "load_after": 0.0, "device": "cpu", "framework": "torch",
        "memory": {"images_per_s": {"DataLoader, 0 workers": [100.0], "hvdtrain": [999.0]}},
        "files": {
            "images_per_s": {
                "DataLoader, 0 workers": [10.0],
                "hvdtrain, 0 workers": [11.0], f"hvdtrain, 0 workers{bench.WHOLE}": [5.5],
            },
            "data": "files", "recommended_workers": 0,
        },
    }  # fmt: skip
    text = bench.report(result)
    assert "in memory: 9.990 [9.990, 9.990] times the DataLoader, 0 workers" in text and "workers=0" in text
    assert "at a fraction: 2.000 [2.000, 2.000] times the images/s of hvdtrain, 0 workers, dec" in text


def test_cores_that_are_not_there(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match=f"at most {len(before)}"):
        bench.run(arguments("--cores", str(len(before) + 1), "--out", str(tmp_path / "x.json")))
    assert os.sched_getaffinity(0) == before
