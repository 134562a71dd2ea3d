"""The pipeline benchmark's machinery and shape; never its timings."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
from harness import run_ranks

from hvdtrain.bench import pipeline
from hvdtrain.core import stats
from hvdtrain.core.errors import ConfigError


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    pipeline.add_arguments(parser)
    return parser.parse_args(flags)


def made_up(**change: float) -> dict[str, Any]:
    """A result in which every target is kept, but for what is changed: seconds by way."""
    seconds = {
        pipeline.PLAIN: 4.0, pipeline.ONE_STAGE: 4.04, pipeline.ALL_CORES: 2.3, pipeline.NAIVE: 4.1,
        "hvdtrain, gpipe, 4 micro-batches": 2.7, "hvdtrain, 1f1b, 8 micro-batches": 2.4,
        "torchgpipe, 4 micro-batches": 4.2, "tutorial pattern, 8 micro-batches": 4.3,
    } | change  # fmt: skip
    return {
        "settings": {"model": "tiny", "batch": 32, "image_size": 64, "stages": 2},
        "machine": stats.machine(), "load_after": 0.0, "cut": [{"name": "a .. b", "segments": 3}] * 2,
        "seconds": {name: [value, value * 1.01] for name, value in seconds.items()},
        "predicted_s": {name: [2.5] for name in seconds if name.startswith("hvdtrain")},
        "predicted_by_profile_s": {},
    }  # fmt: skip


def test_all_targets_kept() -> None:
    text = pipeline.report(made_up())
    assert "MISSED" not in text and text.count("kept") == 6
    assert "hvdtrain, 1f1b, 8 micro-batches / naive split: 0.585 [0.585, 0.585] (target <= 0.625: kept)" in text
    assert "hvdtrain, gpipe, 4 micro-batches / torchgpipe, 4 micro-batches: 0.643" in text, "the same micro-batches"
    assert f"efficiency: {4.1 / 2 / 2.4 / (8 / 9):.3f} (target >= 0.93: kept)" in text


@pytest.mark.parametrize(
    ("name", "seconds", "told"),
    [
        (pipeline.NAIVE, 3.0, "(target <= 0.625: MISSED)"),
        (pipeline.ONE_STAGE, 4.2, "(target <= 1.02: MISSED)"),
        ("torchgpipe, 4 micro-batches", 2.5, "(target <= 1: MISSED)"),
        ("tutorial pattern, 8 micro-batches", 2.3, "(target <= 1: MISSED)"),
        ("hvdtrain, gpipe, 4 micro-batches", 3.0, "(target <= 10%: MISSED)"),
    ],
)
def test_a_missed_target_is_told(name: str, seconds: float, told: str) -> None:
    assert told in pipeline.report(made_up(**{name: seconds}))


def test_within_the_noise_is_told() -> None:
    result = made_up()
    result["seconds"][pipeline.ONE_STAGE] = [3.9, 4.0, 4.1, 4.4, 4.3]
    result["seconds"] = {name: its if len(its) == 5 else its[:1] * 5 for name, its in result["seconds"].items()}
    line = next(line for line in pipeline.verdicts(result) if line.startswith(pipeline.ONE_STAGE))
    assert line.endswith("MISSED, within the noise)")


def test_more_stages_than_cores() -> None:
    for stages in (1, len(os.sched_getaffinity(0)) + 1):
        with pytest.raises(ConfigError, match=r"a core of its own(.|\n)*--ours"):
            pipeline.run(arguments("--stages", str(stages)))


def test_place_for_the_result_is_checked_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--out"):
        pipeline.run(arguments("--out", str(tmp_path / "file" / "x.json")))


def test_another_cut_is_judged_against_ours() -> None:
    hand = f"hvdtrain, 1f1b, 8 micro-batches, {pipeline.BY_HAND} 8|8"
    for seconds, told in ((2.5, "kept"), (2.3, "MISSED")):
        text = pipeline.report(made_up(**{hand: seconds}))
        assert f"hvdtrain, 1f1b, 8 micro-batches / {hand}: {2.4 / seconds:.3f}" in text
        assert text.count("MISSED") == (told == "MISSED")


@pytest.mark.slow
def test_ours_alone_on_one_core(tmp_path: Path) -> None:
    """More stages than cores, another cut, one micro-batch."""
    out = tmp_path / "bench.json"
    flags = ["--ours", "--model=resnet18", "--image-size=64", "--batch=4", "--rounds=1", "--micro-batches", "1", "2",
             "--balance", "20", "15", "--against", "10", "25", f"--out={out}"]  # fmt: skip
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        done = run_ranks(["-m", "hvdtrain", "bench", "pipeline", *flags], 1, launcher="none", timeout_s=240).check()
    finally:
        os.sched_setaffinity(0, cores)
    result = json.loads(out.read_text())
    ours = {f"hvdtrain, {schedule}, {count} micro-batches" for schedule in ("gpipe", "1f1b") for count in (1, 2)}
    by_hand = {f"{name}, {pipeline.BY_HAND} 10|25" for name in ours}
    assert set(result["seconds"]) == {pipeline.NAIVE, *ours, *by_hand} and set(result["predicted_s"]) == ours
    assert all(len(its) == 1 and min(its) > 0 for its in result["predicted_s"].values())
    assert "2 stage(s) on 1 core(s)" in done.out and "efficiency: 0" not in done.out, done.text


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
    expected = {pipeline.PLAIN, pipeline.ONE_STAGE, pipeline.ALL_CORES, pipeline.NAIVE, *ours}
    for rival in ("tutorial pattern", "torchgpipe")[: 2 if "torchgpipe" in result["machine"]["versions"] else 1]:
        expected |= {f"{rival}, 2 micro-batches", f"{rival}, 2 micro-batches, 2 threads an operation"}
    assert set(result["seconds"]) == expected and set(result["predicted_s"]) == ours
    assert all(len(its) == 2 and min(its) > 0 for its in result["seconds"].values())
    for part in (
        "2 stage(s) on 2 core(s)",
        "naive split",
        "efficiency: ",
        "conv1 .. layer3.0.relu (20 segments)",
        str(out),
    ):
        assert part in done.out, done.text
