"""`prepare`, the loop's rules, precision, NaN, memory and the proof: in one process, and on ranks that differ."""

from __future__ import annotations

import pytest
import torch_cases
from harness import Result, run_ranks


@pytest.fixture(scope="module")
def alone() -> Result:
    return run_ranks([torch_cases.FOLDER / "alone.py"], 1, timeout_s=180)


@pytest.fixture(
    scope="module",
    params=[("horovod", "forked"), pytest.param(("ddp", "forked torchrun"), marks=pytest.mark.thorough)],
    ids=["horovod", "ddp"],
)
def two(request: pytest.FixtureRequest) -> Result:
    engine, launcher = request.param
    return run_ranks([torch_cases.FOLDER / "ranks.py", engine], 2, launcher=launcher, timeout_s=180)


@pytest.mark.parametrize("case", torch_cases.names("alone.py"))
def test_in_one_process(case: str, alone: Result) -> None:
    assert case in torch_cases.passed(alone.out), alone.text


@pytest.mark.parametrize("case", torch_cases.names("ranks.py"))
def test_on_two_ranks(case: str, two: Result) -> None:
    assert case in torch_cases.passed(two.out), two.text


def test_programs_end_well(alone: Result, two: Result) -> None:
    alone.check()
    two.check()
