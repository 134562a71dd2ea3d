"""Tuning: the search finds the fastest by few runs, says how sure it is, and refuses a split that does not pay."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import PROGRAMS, run_ranks

PROGRAM = PROGRAMS / "pipeline" / "tune.py"


# ---- of real pipelines, whose stages sleep for known times, or are small


@pytest.fixture(scope="module")
def cases() -> dict[str, dict[str, Any]]:
    ended = run_ranks([PROGRAM], 1, timeout_s=240).check()
    return {case["case"]: case for case in map(json.loads, ended.out.splitlines())}


def test_refuses_a_split_that_does_not_pay(cases: dict[str, dict[str, Any]]) -> None:
    case = cases["does_not_pay"]
    assert not case["pays"] and case["verdict"].startswith("do not split: one device is faster and the model fits: ")
    assert case["one_is_faster"]


def test_leaves_everything_as_it_was(cases: dict[str, dict[str, Any]]) -> None:
    case = cases["left_alone"]
    assert case["equal"] and case["objects"] and case["settings"] == [True, "gpipe"]
    assert case["a step changes it"] >= 4, "the twin: a step that is not undone shows"


def test_what_fails_is_left_out_or_raised(cases: dict[str, dict[str, Any]]) -> None:
    assert cases["too_few_samples"]["best"] == cases["too_few_samples"]["set"] == 3
    assert "Expected more than 1 value per channel" in cases["too_few_samples"]["failed"]["6"]
    nothing = cases["nothing_runs"]
    assert nothing["error"] == "StageError" and "this loss is broken" in nothing["text"]
    assert nothing["micro_batches"] == 1, "as it was"
    alone = cases["does_not_fit"]
    assert alone["pays"] and alone["single_s"] is None and "does not fit on one device" in alone["verdict"]


def test_refusals_name_what_is_possible(cases: dict[str, dict[str, Any]]) -> None:
    assert "between 1 and 4" in cases["refusals"]["candidates"]


def test_no_thread_is_left(cases: dict[str, dict[str, Any]]) -> None:
    assert len(cases) == 6 and {case["threads"] for case in cases.values()} == {1}
