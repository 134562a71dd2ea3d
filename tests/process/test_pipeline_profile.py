"""Measured costs, on models whose costs are known."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import PROGRAMS, run_ranks

PROGRAM = PROGRAMS / "pipeline" / "profile_cases.py"
pytestmark = pytest.mark.slow
FLOAT = 4  # bytes


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    ended = run_ranks([PROGRAM], 1, timeout_s=120).check()
    lines = [json.loads(line) for line in ended.out.splitlines() if line.startswith('{"case"')]
    cases = {line.pop("case"): line for line in lines}
    for name, case in cases.items():
        assert "failed" not in case, f"{name}: {case['failed']}"
    return cases


def test_bytes(found: dict[str, Any]) -> None:
    case = found["bytes_of_layers"]
    assert case["names"] == ["0 .. 1", "2", "3"]
    assert case["gradients"] == [FLOAT * n for n in (16 * 32, 32 * 8 + 8, 16)]
    # with parameters, buffers, and twice the gradients' size for the optimizer
    tensors = [FLOAT * n for n in (16 * 32 + 32, 32 * 8 + 8, 16 + 2 * 8)]
    tensors[2] += 8
    assert case["fixed"] == [own + 3 * trained for own, trained in zip(tensors, case["gradients"], strict=True)]
    # each keeps its input; the ReLU's output is the next one's input; batch norm its mean and deviation besides, and
    # the loss that follows keeps as much as the output
    assert case["kept"] == [4 * 16 * FLOAT, 4 * 32 * FLOAT, 4 * 8 * FLOAT + 2 * 8 * FLOAT + 4 * 8 * FLOAT]
    assert case["output"] == [4 * 32 * FLOAT, 4 * 8 * FLOAT, 0]
    assert case["at 12"] == 12 * 32 * FLOAT
    assert case["seconds"] == [0, 0, 0]


def test_a_shared_parameter_counts_once(found: dict[str, Any]) -> None:
    assert found["shared_counts_once"]["fixed"] == [3 * 8 * 8 * FLOAT, 0]


def test_the_model_and_the_process_stay_as_they_were(found: dict[str, Any]) -> None:
    assert found["left_alone"] == {"same": True, "freed": True, "threads": [], "intra_op": True}


def test_sizes_that_cannot_be_run(found: dict[str, Any]) -> None:
    case = found["sizes_that_fail"]
    assert case["samples"] == [2]
    assert "[1] samples" in case["error"] and "fix: " in case["error"]


def test_on_disk_and_back(found: dict[str, Any]) -> None:
    assert found["on_disk"]["same"]
    assert "Profile.save" in found["on_disk"]["error"]


def test_copies_on_another_device(found: dict[str, Any]) -> None:
    case = found["copies"]
    here, there = case["kept"]
    assert here == there and sum(here) > 0
    assert case["timed"] == [True, True]


def test_ctrl_c_ends_a_measurement_and_its_threads(found: dict[str, Any]) -> None:
    received = found["interrupted"]
    assert received["threads"] == 0
    assert received["after"] <= 8, "passes after the interrupt"
