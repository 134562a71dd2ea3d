"""The benchmarks' machinery and shape; never their timings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_arguments import arguments
from harness import run_ranks

from hvdtrain.bench import train
from hvdtrain.bench.checkpoint import ARMS
from hvdtrain.bench.turns.turns import InterleavedJobs
from hvdtrain.core.errors import HvdtrainError


def test_a_job_that_fails_shows_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments("--framework=keras", "--per-rank-batch=4", "--steps=1")
    monkeypatch.setattr(train, "WAYS", (train.Way("jax", "plain", 1, "jax"),))
    args.backend = "jax"
    with pytest.raises(HvdtrainError) as caught:
        train.measure(args, "mnist")
    assert "ended with 2" in caught.value.received and "tensorflow or torch" in caught.value.received


@pytest.mark.thorough
def test_each_rank_trains_on_a_batch_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """hvdtrain and hand-written DDP on 2 ranks, by a tiny model: what the other rows do in minutes."""
    batches: dict[str, set[float]] = {}
    turn = InterleavedJobs.turn

    def recorded(jobs: InterleavedJobs, name: str, **order: Any) -> list[Any]:
        answers = turn(jobs, name, **order)
        batches[name] = {answer["batch"] for answer in answers}
        return answers

    ways = [way for way in train.WAYS if way.arm in ("alone", "apart", "hvdtrain") and not way.keras]
    monkeypatch.setattr(train, "WAYS", ways)
    monkeypatch.setattr(InterleavedJobs, "turn", recorded)
    flags = ["--framework=torch", "--models=toy", "--pixels=16", "--per-rank-batch=2", "--steps=1", "--blocks=2"]
    assert train.run(arguments(*flags, f"--out={tmp_path / 'bench.json'}")) == 0
    assert {label: len(drawn) for label, drawn in batches.items()} == {way.label: way.processes or 2 for way in ways}, (
        "a rank, a batch"
    )
    printed = capsys.readouterr().out
    for part in (*batches, "samples/s", "efficiency, 95 %", "speed-up, 95 %"):
        assert part in printed, printed
    check_samples(json.loads((tmp_path / "bench.json").read_text())["models"]["toy"], {way.label for way in ways})


def check_samples(part: dict[str, Any], labels: set[str]) -> None:
    """Two blocks of each way, by every clock, and ratios of them."""
    for kind in ("seconds", "cpu_seconds"):
        assert {label for group in part[kind] for label in group} == labels
        assert all(len(its) == 2 and min(its) > 0 for group in part[kind] for its in group.values())
    for ratio in (ratio for its in part["ratios"].values() for ratio in its.values()):
        assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_tiny_bench(tmp_path: Path) -> None:
    """Of Keras, as the command line does it."""
    flags = ["--steps", 2, "--blocks", 2, "--per-rank-batch", 4, "--out", tmp_path / "bench.json"]
    command = ["-m", "hvdtrain", "bench", "train", "--framework", "keras", *map(str, flags)]
    done = run_ranks(command, 1, launcher="none", timeout_s=240).check()
    labels = {way.label for way in train.WAYS if way.keras == "tensorflow"}
    assert all(f"\n{label} " in done.out for label in labels) and "speed-up, 95 %" in done.out
    result = json.loads((tmp_path / "bench.json").read_text())
    assert (result["format"], result["bench"], result["settings"]["framework"]) == (1, "train", "keras")
    assert {"keras", "numpy", "hvdtrain"} <= set(result["machine"]["versions"])
    assert result["machine"]["cores"] >= 1 and result["settings"]["steps"] == 2
    check_samples(result["models"]["mnist"], labels)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("arm", ARMS)
def test_a_tiny_bench_of_checkpoints(arm: str, tmp_path: Path) -> None:
    flags = ["--arms", arm, "--megabytes", 16, "--rounds", 2, "--steps", 2, "--out", tmp_path / "bench.json"]
    done = run_ranks(["-m", "hvdtrain", "bench", "checkpoint", *map(str, flags)], 1, launcher="none", timeout_s=240)
    assert ARMS[arm][0] in done.check().out and "checkpoints of 16 MB" in done.out
    found = json.loads((tmp_path / "bench.json").read_text())["arms"][arm]
    assert 32e6 < found["image_bytes"] < 40e6, "of two checkpoints"
    names = ("at once", "later", "sealed", "alone", "beside")
    assert [len([value for value in found[name] if value > 0]) for name in names] == [2] * 5
    assert all(sealed > later for sealed, later in zip(found["sealed"], found["later"], strict=True))


@pytest.mark.slow
@pytest.mark.thorough
def test_torch_bench_measures_and_writes(tmp_path: Path) -> None:
    out = tmp_path / "torch.json"
    flags = ["--framework=torch", "--models", "squeezenet1_1", "--pixels=32", "--per-rank-batch=2", "--steps=1"]
    command = ["-m", "hvdtrain", "bench", "train", *flags, "--blocks=2", "--ranks=1", f"--out={out}"]
    result = run_ranks(command, 1, launcher="none", timeout_s=180).check()
    assert "samples/s" in result.out
    labels = {"PyTorch, one process", "hvdtrain on Horovod, one process"}
    check_samples(json.loads(out.read_text())["models"]["squeezenet1_1"], labels)
