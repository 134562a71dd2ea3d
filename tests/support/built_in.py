"""Runs of the programs that hvdtrain brings, and the small data that they are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from harness import Result

from hvdtrain.datasets import digits

FEW = 403  # prime: an uneven tail on any number of ranks


def few_digits(folder: Path) -> Path:
    """Writes a part of the digits as a file of the user's own."""
    x_train, y_train, x_test, y_test = digits.load()
    np.savez(folder / "few.npz", x_train=x_train[:FEW], y_train=y_train[:FEW], x_test=x_test[:97], y_test=y_test[:97])
    return folder / "few.npz"


def record(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "run.json").read_text())


def check_run(result: Result, run_dir: Path, ranks: int, accuracy: str) -> dict[str, Any]:
    """Asserts what every good run shows; returns its result. `accuracy`: what its top-1 is called."""
    result.check()
    text = "\n".join(result.ranks_output.values())
    assert f"weights: bit-equal on {ranks} rank" in text
    assert [rank for rank, its_text in result.ranks_output.items() if its_text.strip()] == [0]
    run = record(run_dir)
    assert run["status"] == "finished" and run["world"]["size"] == ranks
    assert f"{accuracy} {run['result']['top1']:.4f}" in text
    verdict = result.ranks_output[0].rstrip().rpartition("\nverdict: ")[2]  # the last word; by the clock of the run
    assert verdict == run["result"]["verdict"], text
    assert abs(sum(run["result"]["shares"].values()) - 1) < 1e-6
    return run["result"]
