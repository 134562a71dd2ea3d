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


def made_up(**change: float) -> dict[str, Any]:
    """Returns a result, with changed seconds by way."""
    seconds = {
        pipeline.PLAIN: 4.0, pipeline.ONE_STAGE: 4.04, pipeline.ALL_CORES: 2.3, pipeline.NAIVE: 4.1,
        "hvdtrain, gpipe, 4 micro-batches": 2.7, "hvdtrain, 1f1b, 8 micro-batches": 2.4,
        "tutorial pattern, 4 micro-batches": 4.2,
    } | change  # fmt: skip
    return {
        "settings": {"model": "tiny", "batch": 32, "image_size": 64, "stages": 2},
        "machine": stats.machine(), "load_after": 0.0, "cut": [{"name": "a .. b", "segments": 3}] * 2,
        "seconds": {name: [value, value * 1.01] for name, value in seconds.items()},
    }  # fmt: skip


def test_variants_are_compared() -> None:
    text = pipeline.report(made_up())
    assert "hvdtrain, 1f1b, 8 micro-batches / naive split: 0.585 [0.585, 0.585]\n" in text
    assert f"{pipeline.ONE_STAGE} / {pipeline.PLAIN}: 1.010" in text
    assert f"hvdtrain, 1f1b, 8 micro-batches / {pipeline.ALL_CORES}: 1.043" in text
    assert "hvdtrain, gpipe, 4 micro-batches / tutorial pattern, 4 micro-batches: 0.643" in text, (
        "the same micro-batches"
    )
    assert f"{4.1 / 2 / 2.4 / (8 / 9):.3f}" in text, "the efficiency"


def test_more_stages_than_cores() -> None:
    for stages in (1, len(os.sched_getaffinity(0)) + 1):
        with pytest.raises(ConfigError, match=r"each stage needs a core"):
            pipeline.run(arguments("--stages", str(stages)))
