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
    ended = run_ranks([PROGRAM], 1, timeout_s=120, env={"OMP_NUM_THREADS": "2"}).check()
    lines = [json.loads(line) for line in ended.out.splitlines() if line.startswith('{"case"')]
    cases = {line.pop("case"): line for line in lines}
    for name, case in cases.items():
        assert "failed" not in case, f"{name}: {case['failed']}"
    return cases


@pytest.mark.thorough  # by the clock: it wants a machine of its own
def test_seconds_of_each_segment_and_size(found: dict[str, Any]) -> None:
    case = found["seconds"]
    assert case["samples"] == [1, 2]
    for kind, factor in (("forward", 1), ("backward", 3)):
        for per_sample, measured in zip((0.009, 0.003), case[kind], strict=True):
            wanted = [factor * per_sample * samples for samples in (1, 2, 4)]
            assert measured == pytest.approx(wanted, rel=0.4, abs=0.004), (kind, per_sample)


def test_bytes(found: dict[str, Any]) -> None:
    case = found["bytes_of_layers"]
    assert case["names"] == ["0 .. 1", "2", "3"]
    assert case["parameters"] == [FLOAT * n for n in (16 * 32 + 32, 32 * 8 + 8, 16)]
    assert case["gradients"] == [FLOAT * n for n in (16 * 32, 32 * 8 + 8, 16)]
    assert case["optimizer"] == [2 * n for n in case["gradients"]]
    assert case["buffers"] == [0, 0, 2 * 8 * FLOAT + 8]
    # each keeps its input; the ReLU's output is the next one's input; batch norm its mean and deviation besides, and
    # the loss that follows keeps as much as the output
    assert case["kept"] == [4 * 16 * FLOAT, 4 * 32 * FLOAT, 4 * 8 * FLOAT + 2 * 8 * FLOAT + 4 * 8 * FLOAT]
    assert case["output"] == [4 * 32 * FLOAT, 4 * 8 * FLOAT, 0]
    assert case["at 12"] == 12 * 32 * FLOAT
    assert case["seconds"] == [0, 0, 0]


def test_a_shared_parameter_counts_once(found: dict[str, Any]) -> None:
    assert found["shared_counts_once"]["parameters"] == [8 * 8 * FLOAT, 0]


def test_the_model_and_the_process_stay_as_they_were(found: dict[str, Any]) -> None:
    assert found["left_alone"] == {"same": True, "threads": [], "intra_op": True}


def test_sizes_that_cannot_be_run(found: dict[str, Any]) -> None:
    case = found["sizes_that_fail"]
    assert case["samples"] == [2]
    assert "[1] samples" in case["error"] and "fix: " in case["error"]


def test_stages_that_share_cores_slow_each_other(found: dict[str, Any]) -> None:
    case = found["contention"]
    assert case["free"][0] == case["locked"][0] == 1
    assert case["free"][1] > 0.85
    assert case["locked"][1] < 0.7, "the twin: they wait for each other"


@pytest.mark.parametrize("case", ["weights_made_in_each_pass", "weights_that_two_stages_share"])
def test_each_thread_has_layers_of_its_own(found: dict[str, Any], case: str) -> None:
    assert len(found[case]["speeds"]) == 2


def test_on_disk_and_back(found: dict[str, Any]) -> None:
    assert found["on_disk"]["same"]
    assert "Profile.save" in found["on_disk"]["error"]


def test_copies_on_another_device(found: dict[str, Any]) -> None:
    case = found["copies"]
    here, at_once, in_turn = case["kept"]
    assert here == at_once == in_turn and sum(here) > 0
    assert case["timed"] == [True, True, True]
    assert case["wholes"] == 1, "what does not fit is not tried again"


def test_ctrl_c_ends_a_measurement_and_its_threads(found: dict[str, Any]) -> None:
    told = found["interrupted"]["told"]
    assert len(told) == 2
    assert all(one["threads"] == 0 for one in told)
    assert all(one["after"] <= 8 for one in told), "passes after the interrupt"
