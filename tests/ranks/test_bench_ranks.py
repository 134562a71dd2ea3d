"""The benchmarks' machinery and shape; never their timings."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from bench_arguments import arguments
from harness import run_ranks
from matplotlib.image import imread

from hvdtrain.bench import compared, train
from hvdtrain.bench.checkpoint import ARMS
from hvdtrain.core.errors import HvdtrainError
from hvdtrain.record import stats


def test_report_says_when_the_target_is_missed() -> None:
    result = {
        "backend": "tensorflow", "settings": {"per_rank_batch": 8}, "machine": stats.machine(), "load_after": 0.0,
        "overhead": {
            "seconds_per_step": {"plain": [1.0], "prepared": [1.03]}, "ratio": {"value": 1.03, "low": 1.0, "high": 1.1},
            "cpu_seconds_per_step": {"plain": [1.0], "prepared": [1.0]}, "target": 1.02,
            "cpu_ratio": {"value": 1.0, "low": 1.0, "high": 1.0},
        },
    }  # fmt: skip
    assert "MISSED" in train.report(result)
    result["overhead"]["ratio"]["value"] = 1.01  # type: ignore[index]
    assert "MISSED" not in train.report(result)


def test_failed_job_shows_its_end() -> None:
    with pytest.raises(HvdtrainError) as caught:
        train.measure(arguments("--per-rank-batch=4", "--steps=1"), "jax")
    assert "ended with 2" in caught.value.received and "tensorflow or torch" in caught.value.received


@pytest.mark.slow
def test_a_tiny_bench(tmp_path: Path) -> None:
    """Both parts, all of it, as the command line does it."""
    flags = ["--steps", 2, "--blocks", 2, "--rounds", 1, "--per-rank-batch", 4, "--out", tmp_path / "bench.json"]
    done = run_ranks(
        ["-m", "hvdtrain", "bench", "train", "--framework", "keras", *map(str, flags)],
        1,
        launcher="none",
        timeout_s=240,
    ).check()
    parts = ("plain Keras", "prepared", "1 rank", "2 ranks", "2 processes, no communication", "speed-up", "efficiency")
    for part in (*parts, str(tmp_path / "bench.json")):
        assert part in done.out
    assert "1/2 " in done.err and "2/2 " in done.err
    check_result(json.loads((tmp_path / "bench.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["torch", *(pytest.param(arm, marks=pytest.mark.thorough) for arm in list(ARMS)[1:])])
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
def test_the_model_of_many_ranks_beside_two(tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    flags = ["--model=squeezenet1_1", "--pixels=32", "--per-rank-batch=2", "--steps=1", "--rounds=2", f"--out={out}"]
    done = run_ranks(["-m", "hvdtrain", "bench", "scale", *flags], 1, launcher="none", timeout_s=240).check()
    assert "2 ranks, from a step of 1, and the link" in done.out
    part = json.loads(out.read_text())["ranks"]["2"]
    assert all(len(samples) == 2 and min(samples) > 0 for samples in part["seconds"].values())
    for name, ratio in part["of_measured"].items():
        assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"] and part["predicted_s"][name] > 0
    link = part["link"].values()  # of two rounds: what is latency, and what a rate, is the clock's to say
    assert min(link) >= 0 < max(link)


def check_result(result: dict[str, Any]) -> None:
    assert (result["format"], result["bench"], result["framework"]) == (1, "train", "keras")
    assert {"keras", "numpy", "hvdtrain"} <= set(result["machine"]["versions"])
    assert result["machine"]["cores"] >= 1 and result["settings"]["steps"] == 2
    steps = result["overhead"]["seconds_per_step"]
    assert len(steps["plain"]) == len(steps["prepared"]) == 2
    assert all(value > 0 for samples in steps.values() for value in samples)
    assert {*result["overhead"]["cpu_seconds_per_step"]} == {"plain", "prepared"}
    for ratio in (
        result["overhead"]["ratio"],
        result["overhead"]["cpu_ratio"],
        result["scaling"]["speedup"],
        result["scaling"]["efficiency"],
    ):
        assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"]
    assert set(result["scaling"]["seconds_per_step"]) == {"1", "2", train.LIMIT}


@pytest.mark.slow
def test_torch_bench_measures_and_writes(tmp_path: Path) -> None:
    out = tmp_path / "torch.json"
    flags = ["--framework=torch", "--models", "squeezenet1_1", "--pixels=32", "--per-rank-batch=2", "--steps=1"]
    command = ["-m", "hvdtrain", "bench", "train", *flags, "--blocks=2", "--ranks=1", f"--out={out}"]
    result = run_ranks(command, 1, launcher="none", timeout_s=180).check()
    assert "one process, against plain PyTorch" in result.out and "images/s" in result.out
    stored = json.loads(out.read_text())
    seconds = stored["models"]["squeezenet1_1"]["seconds_per_step"]
    assert {name: len(samples) for name, samples in seconds.items()} == {
        "plain PyTorch, 1 process": 2, "hvdtrain, 1 process": 2,
    }  # fmt: skip
    assert all(value > 0 for samples in seconds.values() for value in samples)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "backend", "groups"),
    [
        pytest.param("keras", "torch", 1, marks=pytest.mark.thorough),
        pytest.param("keras", "", 2, marks=pytest.mark.thorough),
        pytest.param("torch", "", 2, marks=pytest.mark.thorough),
    ],
)
def test_every_way_is_measured(framework: str, backend: str, groups: int, tmp_path: Path) -> None:
    """`--all`, as the command line does it; of each framework its ways, in groups."""
    out = tmp_path / "all.json"
    flags = ["--models", "toy", "--pixels=16", "--per-rank-batch=4", "--steps=1", "--blocks=2", f"--out={out}"]
    command = ["-m", "hvdtrain", "bench", "train", "--all", f"--framework={framework}", "--at-once=12", *flags]
    command += [f"--backend={backend}"] if backend else []
    done = run_ranks(command, 1, launcher="none", timeout_s=300).check()
    part = json.loads(out.read_text())["compared"]
    labels = {way.label for way in compared.WAYS if bool(way.keras) == (framework == "keras") and backend in way.keras}
    assert set(part["ratios"]) == set(part["memory_bytes"]) == set(part["lines"]) == labels
    assert all(f"\n{label} " in done.out for label in labels) and "left out" not in done.err
    assert len(part["groups"]) == groups and f"group {groups} of {groups}: round 2 of 2" in done.err
    for label, ratio in part["ratios"].items():
        check_ratios(label, ratio, part["groups"])
        assert part["memory_bytes"][label] > 2**20
    height, width = imread(out.with_suffix(".png")).shape[:2]
    assert width > 1000 and height > 40 * len(labels)


def check_ratios(label: str, ratio: dict[str, Any], groups: list[dict[str, list[float]]]) -> None:
    """They are those of the samples, pair by pair."""
    (way,) = (way for way in compared.WAYS if way.label == label)
    its = [group for group in groups if label in group]
    assert its and all({way.alone, way.apart} <= set(group) for group in its)
    assert all(len(samples) == 2 and min(samples) > 0 for group in its for samples in group.values())
    for kind, against, factor in (("speedup", way.alone, 2), ("efficiency", way.apart, 1)):
        if label == way.alone:
            assert ratio == {"speedup": {"value": 1, "low": 1, "high": 1}}
        else:
            pairs = [pair for group in its for pair in zip(group[against], group[label], strict=True)]
            assert ratio[kind]["value"] == pytest.approx(factor * median(above / below for above, below in pairs))
            assert ratio[kind]["low"] <= ratio[kind]["value"] <= ratio[kind]["high"]
