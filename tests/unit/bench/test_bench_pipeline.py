"""The pipeline benchmark's machinery and shape; never its timings."""

from __future__ import annotations

import argparse
import os
from typing import Any

import pytest

from hvdtrain.bench import pipeline
from hvdtrain.core.errors import ConfigError
from hvdtrain.record import stats


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    pipeline.add_arguments(parser)
    return parser.parse_args(flags)


def made_up() -> dict[str, Any]:
    """Returns a result."""
    seconds = {
        "single device (cpu with 1 thread)": 4.0, "naive split": 4.1, "hvdtrain, gpipe, 4 micro-batches": 2.7,
        "hvdtrain, 1f1b, 8 micro-batches": 2.4, "tutorial pattern, 4 micro-batches": 4.2,
    }  # fmt: skip
    return {
        "settings": {"model": "tiny", "batch": 32, "image_size": 64, "stages": 2},
        "machine": stats.machine(), "load_after": 0.0, "cut": [{"name": "a .. b", "segments": 3}] * 2,
        "seconds": {name: [value, value * 1.01] for name, value in seconds.items()},
    }  # fmt: skip


def test_variants_are_compared() -> None:
    text = pipeline.report(made_up())
    assert "the pipeline: hvdtrain, 1f1b, 8 micro-batches\n" in text, "the fastest"
    row = {line.rpartition("  ")[0].split("  ")[0]: line.rpartition("  ")[2] for line in text.splitlines()}
    assert row["naive split"] == "0.585 [0.585, 0.585]"
    assert row["tutorial pattern, 4 micro-batches"] == "0.571 [0.571, 0.571]"
    assert f"hvdtrain, 1f1b, 8 micro-batches: {4.1 / 2 / 2.4 / (8 / 9):.3f}" in text, "the efficiency"
    assert f"hvdtrain, gpipe, 4 micro-batches: {4.1 / 2 / 2.7 / (4 / 5):.3f}" in text


def test_more_stages_than_cores() -> None:
    for stages in (1, len(os.sched_getaffinity(0)) + 1):
        with pytest.raises(ConfigError, match=r"each stage needs a core"):
            pipeline.run(arguments("--stages", str(stages)))
