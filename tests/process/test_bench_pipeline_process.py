"""The pipeline benchmark's machinery and shape; never its timings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from harness import run_ranks


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two stages have a core each")
def test_a_tiny_bench(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    flags = ["--model=resnet18", "--image-size=64", "--batch=4", "--rounds=2", "--micro-batches=2", "--balance", "20",
             "15", f"--out={out}"]  # fmt: skip
    done = run_ranks(["-m", "hvdtrain", "bench", "pipeline", *flags], 1, launcher="none", timeout_s=240).check()
    result = json.loads(out.read_text())
    assert (result["format"], result["bench"], result["settings"]["batch"]) == (1, "pipeline", 4)
    ours = {"hvdtrain, gpipe, 2 micro-batches", "hvdtrain, 1f1b, 2 micro-batches"}
    expected = {"single device (cpu with 1 thread)", "unsplit (cpu with 2 threads)", "naive split", *ours}
    expected.add("tutorial pattern, 2 micro-batches, 2 threads an operation")
    assert set(result["seconds"]) == expected
    assert all(len(its) == 2 and min(its) > 0 for its in result["seconds"].values())
    for part in ("2 stage(s) on 2 core(s)", "efficiency: ", "conv1 .. layer3.0.relu (20 segments)", str(out)):
        assert part in done.out, done.text
