"""The small CIFAR-10 example: it runs, it learns, and it resumes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from built_in import record
from harness import REPOSITORY, Result, run_ranks

from hvdtrain.record.log import read_events


def run_program(launcher: str, ranks: int, *flags: object) -> Result:
    command = [str(REPOSITORY / "examples" / "cifar10.py"), "--data", "digits", *map(str, flags)]
    return run_ranks(command, ranks, launcher=launcher, timeout_s=120).check()


def result(run_dir: Path) -> dict[str, Any]:
    run = record(run_dir)
    assert run["status"] == "finished"
    return run["result"]


@pytest.mark.slow
def test_it_learns_the_digits_on_two_ranks(tmp_path: Path) -> None:
    ended = run_program("forked", 2, "--run-dir", tmp_path / "run")
    assert result(tmp_path / "run")["top1"] >= 0.95
    text = ended.ranks_output[0]
    assert "top-1 0.9" in text and "64 pictures an update" in text and re.search(r"\d+\.\d s in all", text)
    said = text.rstrip().rpartition("\nverdict: ")[2]
    assert said == result(tmp_path / "run")["verdict"] and not ended.ranks_output.get(1, "").strip()


@pytest.mark.thorough
@pytest.mark.slow
def test_under_ddp_in_mixed_precision_with_resume(tmp_path: Path) -> None:
    flags = ["--per-rank-batch", 64, "--engine", "ddp", "--amp", "bf16", "--run-dir", tmp_path / "run", "--epochs"]
    run_program("forked torchrun", 2, *flags, 1)
    first = result(tmp_path / "run")["weights_sha256"]
    run_program("forked torchrun", 2, *flags, 2, "--resume", "--amp", "fp16")
    assert result(tmp_path / "run")["weights_sha256"] != first
    assert [event["epoch"] for event in read_events(tmp_path / "run") if event["kind"] == "epoch"] == [0, 1]
