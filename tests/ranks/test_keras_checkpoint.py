"""Checkpoints of the Keras adapter: exact resume, and files that plain Keras loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import PROGRAMS, run_ranks
from keras_cases import BACKENDS
from run_logs import strict

FOLDER = PROGRAMS / "keras"


@pytest.fixture(scope="module", params=BACKENDS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs four epochs at once, and two and two in separate jobs; all state of every rank is stored."""
    folder = tmp_path_factory.mktemp("resume")
    env = {"KERAS_BACKEND": request.param}
    run_ranks([FOLDER / "resume.py", "both", folder], 2, env=env, timeout_s=180).check()
    run_ranks([FOLDER / "resume.py", "second", folder], 2, env=env, timeout_s=180).check()
    plain: list[str | Path] = [FOLDER / "resume.py", "plain", folder, newest(folder / "parts", 2) / "model.keras"]
    (folder / "plain.txt").write_text(run_ranks(plain, 1, launcher="none", env=env).check().out)
    return folder


def newest(folder: Path, epoch: int) -> Path:
    return max(path for path in folder.iterdir() if path.name.startswith(f"epoch-{epoch:04d}"))


def arrays(path: Path) -> list[np.ndarray]:
    stored = np.load(path)
    return [stored[name] for name in stored.files]


def facts(folder: Path, name: str, rank: int) -> dict[str, Any]:
    return dict(json.loads((folder / f"{name}.rank{rank}.json").read_text()))


def test_a_resumed_job_is_bit_equal_to_an_uninterrupted_one(runs: Path) -> None:
    """Weights, statistics, slots, accumulators, counters, rate, seed generators, metrics; with dropout. The twin: the
    state in the middle is another."""
    for rank in (0, 1):
        whole, second, middle = (
            [array.tobytes() for array in arrays(runs / f"{name}_end.rank{rank}.npz")]
            for name in ("whole", "second", "first")
        )
        assert whole == second != middle
    for name in ("whole_end", "first_end", "second_end"):
        assert facts(runs, name, 0)["fingerprint"] == facts(runs, name, 1)["fingerprint"]
    assert facts(runs, "second_end", 0)["progress"] == "Progress(epoch=2, step=6, samples_seen=80, samples_in_epoch=0)"


def test_each_save_is_in_the_runs_record(runs: Path) -> None:
    events = [event for event in strict(runs / "whole" / "log" / "events.jsonl") if event["kind"] == "checkpoint"]
    assert [event["epoch"] for event in events] == [1, 2, 3, 4]
    for event in events[1:]:  # the first is no longer kept
        files = json.loads((runs / "whole" / event["path"] / "manifest.json").read_text())["files"]
        assert event["bytes"] == sum(file["bytes"] for file in files.values())
        assert event["blocked_s"] > 0 and event["sealed_s"] > 0


def test_plain_keras_loads_the_model_without_horovod_and_hvdtrain(runs: Path) -> None:
    weights, loaded = arrays(runs / "restored.rank0.npz"), arrays(runs / "plain.npz")
    assert [a.tobytes() for a in loaded] == [b.tobytes() for b in weights[: len(loaded)]]
    assert "loaded Adam updates=3 moved=True" in (runs / "plain.txt").read_text()


def test_random_state_is_plain_arrays(runs: Path) -> None:
    stored = np.load(newest(runs / "parts", 4) / "random.npz", allow_pickle=False)
    assert int(stored["world_size"]) == 2
    assert {name.partition("/")[0] for name in stored.files} == {"0", "1", "counts", "order", "world_size"}
    assert all(stored[name].dtype != object for name in stored.files)
