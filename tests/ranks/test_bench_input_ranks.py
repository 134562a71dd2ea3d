"""The input benchmark's machinery and shape; never its timings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import run_ranks
from pictures import CORRUPT, write_folder


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
