"""The input benchmark's machinery and shape; never its timings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import run_ranks
from pictures import CORRUPT, write_folder

from hvdtrain.bench import keras_input


@pytest.mark.slow
@pytest.mark.thorough
def test_a_tiny_bench(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "images")
    (root / "train" / "bee" / CORRUPT).unlink()  # torchvision's ImageFolder ends at it
    flags = ["--data", root, "--workers", 0, 1, "--seconds", 0.05, "--rounds", 2, "--per-rank-batch", 16,
             "--image-size", 16, "--cores", 1, "--out", tmp_path / "bench.json"]  # fmt: skip
    done = run_ranks(["-m", "hvdtrain", "bench", "input", *map(str, flags)], 1, launcher="none", timeout_s=150)
    done.check()
    for part in ("pictures in memory", "17 image files of 3 classes", "times the DataLoader, 0 workers", "workers="):
        assert part in done.out, done.out
    result = json.loads((tmp_path / "bench.json").read_text())
    assert set(result["memory"]["images_per_s"]) == {"DataLoader, 0 workers", "DataLoader, 1 workers", "hvdtrain"}
    assert len(result["files"]["images_per_s"]) == 4 and result["machine"]["cores_usable"] == 1
    assert all(
        rate > 0 for part in ("memory", "files") for its in result[part]["images_per_s"].values() for rate in its
    )
    assert result["files"]["recommended_workers"] in (0, 1)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_tiny_bench_of_keras(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "images")
    (root / "train" / "bee" / CORRUPT).unlink()
    flags = ["--framework", "keras", "--data", root, "--workers", 0, 2, "--seconds", 0.02, "--rounds", 1,
             "--per-rank-batch", 16, "--image-size", 8, "--cores", 1, "--out", tmp_path / "bench.json"]  # fmt: skip
    command = ["-m", "hvdtrain", "bench", "input", *map(str, flags)]
    done = run_ranks(command, 1, launcher="none", timeout_s=150, env={"KERAS_BACKEND": ""}).check()
    result = json.loads((tmp_path / "bench.json").read_text())
    assert (result["framework"], result["backend"]) == ("keras", "tensorflow")
    assert set(result["memory"]["images_per_s"]) == {"fit(x, y)", "hvdtrain.keras.loader"}
    rates = result["files"]["images_per_s"]
    plain = {"PyDataset, no workers", "PyDataset, 2 threads", "PyDataset, 2 processes"}
    queues = sorted(set(rates) - plain)
    (best,) = {name.partition(", max_queue_size=")[0] for name in queues}
    assert plain < set(rates) and best in plain and len(queues) == 3
    assert {name.rpartition("=")[2] for name in queues} == {"2", "10", "50"}
    assert all(len(its) == 1 and its[0] > 0 for its in (*rates.values(), *result["memory"]["images_per_s"].values()))
    for name in (*result["memory"]["images_per_s"], *rates):
        assert f"\n{name} " in done.out, done.out
    name, rate = keras_input.recommend(rates)
    assert result["files"]["recommended"] == name
    assert f"for files like these: {name or 'no workers'}, {rate:,.0f} images/s" in done.out, done.out
    assert "17 image files of 3 classes" in done.out and result["machine"]["cores_usable"] == 1
