"""The pipeline benchmark's machinery and shape; never its timings."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.bench import pipeline
from hvdtrain.core.errors import ConfigError
from hvdtrain.record import stats


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
