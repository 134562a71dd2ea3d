"""What would run when on GPUs, told by a stand-in that records streams and events; and what lasts from step to step."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import PROGRAMS, run_ranks

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found() -> Found:
    result = run_ranks([PROGRAMS / "pipeline" / "streams.py"], 1, timeout_s=240).check()
    lines = [json.loads(line) for line in result.out.splitlines() if line.startswith("{")]
    return {line.pop("check"): line for line in lines}


def test_streams_are_in_order(found: Found) -> None:
    """Whatever is read was written before, and no memory is used again before it was read."""
    assert found["order"]["problems"] == {} and found["order"]["difference"] < 1e-10
    assert found["order"]["cases"] == 8


def test_200_steps_leave_nothing(found: Found) -> None:
    lasting = found["lasting"]
    assert lasting["same"] and lasting["problems"] == [] and lasting["waits"]
    assert lasting["threads"] == 3 and lasting["left"] == 1


def test_threads_end_with_the_pipeline(found: Found) -> None:
    assert found["ends"] == {
        "alive": 3, "child": "True 3", "again": True, "closed": 1, "waited": False, "gone": 1,
    }  # fmt: skip
