"""A checkpoint written under one engine loads under any other: one training, handed from engine to engine."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import PROGRAMS, Result, run_ranks

PROGRAM = PROGRAMS / "torch" / "relay.py"


def legs(done: Result) -> list[dict[str, Any]]:
    text = done.check().ranks_output[0]
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("relay")


@pytest.fixture(scope="module")
def run(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Legs that end in the middle of epochs of 5 updates; every engine writes one, and reads another's."""
    relay, alone, twin = folder / "relay", folder / "alone", folder / "twin"
    first = [f"{alone}:solo=19", f"{twin}:solo=17", f"{twin}:solo!=2", f"{relay}:solo=3", f"{relay}:dataparallel=4"]
    results = legs(run_ranks([PROGRAM, *first], 1, timeout_s=180))
    race = results[3:]
    race += legs(
        run_ranks([PROGRAM, f"{relay}:ddp=3", f"{relay}:deepspeed=3"], 2, launcher="forked torchrun", timeout_s=180)
    )
    last = [f"{relay}:horovod=2", f"{relay}:ddp=1", f"{relay}:deepspeed=1"]
    race += legs(run_ranks([PROGRAM, *last], 2, timeout_s=180))
    race += legs(run_ranks([PROGRAM, f"{relay}:solo=2"], 1))
    return {"alone": results[:1], "twin": results[1:3], "relay": race}


def test_every_engine_takes_over_where_another_stopped(run: dict[str, list[dict[str, Any]]]) -> None:
    engines = ["solo", "dataparallel", "ddp", "deepspeed", "horovod", "ddp", "deepspeed", "solo"]
    assert [its["engine"] for its in run["relay"]] == engines
    for before, after in pairwise(run["relay"]):
        assert after["began"] == before["ended"], f"{before['engine']} to {after['engine']}"


def test_the_whole_is_one_training(run: dict[str, list[dict[str, Any]]]) -> None:
    """Momentum and the place in the data came along: the twin, which gets the weights only, ends elsewhere."""
    alone = run["alone"][0]

    def gap(its: dict[str, Any]) -> float:
        return float(np.max(np.abs(np.subtract(its["values"], alone["values"]))))  # NaN stays NaN

    assert run["relay"][-1]["ended"]["step"] == alone["ended"]["step"] == 19
    assert run["relay"][-1]["ended"]["place"] == alone["ended"]["place"]
    assert gap(run["relay"][-1]) <= 1e-5  # float32: DeepSpeed does not reduce float64
    assert gap(run["twin"][-1]) > 1e-3


def test_files_are_the_same_two_under_every_engine(folder: Path, run: dict[str, list[dict[str, Any]]]) -> None:
    kept = sorted((folder / "relay").glob("epoch-*"))
    assert len(kept) == 3
    for checkpoint in kept:
        assert sorted(path.name for path in checkpoint.iterdir()) == [
            "manifest.json",
            "model.safetensors",
            "training.pt",
        ]
