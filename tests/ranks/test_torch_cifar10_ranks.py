"""The small CIFAR-10 example: it runs, it learns, it goes on, and it stays short enough to be read."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Result, run_ranks

PICTURE_BYTES = 3 * 32 * 32


@pytest.fixture(scope="module")
def few_pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10's files with few pictures in them: each class has a brightness of its own."""
    folder = tmp_path_factory.mktemp("cifar") / "cifar-10-batches-py"
    folder.mkdir()
    rng = np.random.default_rng(2)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        labels = np.arange(23, dtype=np.uint8) % 10
        noise = rng.integers(0, 20, (23, PICTURE_BYTES))
        pictures = (noise + 23 * labels[:, None]).astype(np.uint8)
        (folder / name).write_bytes(pickle.dumps({b"data": pictures, b"labels": labels.tolist()}, protocol=2))
    return folder


def run_program(launcher: str, ranks: int, *flags: object) -> Result:
    env = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    command = ["-m", "hvdtrain.torch_cifar10", *map(str, flags)]
    return run_ranks(command, ranks, launcher=launcher, timeout_s=120, env=env).check()


def result(run_dir: Path) -> dict[str, Any]:
    run = json.loads((run_dir / "run.json").read_text())
    assert run["status"] == "finished"
    return run["result"]


@pytest.mark.slow
def test_it_learns_the_digits_on_two_ranks(tmp_path: Path) -> None:
    ended = run_program("forked", 2, "--data", "digits", "--run-dir", tmp_path / "run")
    assert result(tmp_path / "run")["top1"] >= 0.95
    text = ended.ranks_output[0]
    assert "top-1 0.9" in text and "64 pictures an update" in text and re.search(r"\d+\.\d s in all", text)
    said = text.rstrip().rpartition("\nverdict: ")[2]
    assert said == result(tmp_path / "run")["verdict"] and not ended.ranks_output.get(1, "").strip()


@pytest.mark.thorough
@pytest.mark.slow
def test_cifars_files_under_ddp_with_resume(few_pictures: Path, tmp_path: Path) -> None:
    flags = ["--data", few_pictures, "--per-rank-batch", 8, "--engine", "ddp", "--amp", "bf16", "--epochs"]
    ended = run_program("forked torchrun", 2, *flags, 1, "--run-dir", tmp_path / "run")
    assert "CIFAR-10: 115 training and 23 test" in ended.ranks_output[0]
    first = result(tmp_path / "run")["weights_sha256"]
    run_program("forked torchrun", 2, *flags, 2, "--run-dir", tmp_path / "run", "--resume", "--amp", "fp16")
    assert result(tmp_path / "run")["weights_sha256"] != first
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["epoch"] for event in events if event["kind"] == "epoch"] == [0, 1]
