"""`prepare`, the loop's rules, precision, NaN, memory and the proof: in one process, and on ranks that differ."""

from __future__ import annotations

import pytest
import torch_cases
from harness import Result, run_ranks

ALONE = [(program, case) for program in ("alone.py", "trouble.py") for case in torch_cases.names(program)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Result]:
    programs = sorted({program for program, _ in ALONE})
    return {p: run_ranks([torch_cases.FOLDER / p], 1, timeout_s=180) for p in programs}


@pytest.fixture(
    scope="module",
    params=[("horovod", "forked"), pytest.param(("ddp", "forked torchrun"), marks=pytest.mark.thorough)],
    ids=["horovod", "ddp"],
)
def two(request: pytest.FixtureRequest) -> Result:
    engine, launcher = request.param
    return run_ranks([torch_cases.FOLDER / "ranks.py", engine], 2, launcher=launcher, timeout_s=180)


@pytest.mark.parametrize(("program", "case"), ALONE)
def test_in_one_process(program: str, case: str, alone: dict[str, Result]) -> None:
    assert case in torch_cases.passed(alone[program].out), alone[program].text


@pytest.mark.parametrize("case", torch_cases.names("ranks.py"))
def test_on_two_ranks(case: str, two: Result) -> None:
    assert case in torch_cases.passed(two.out), two.text


def test_programs_end_well(alone: dict[str, Result], two: Result) -> None:
    for result in [*alone.values(), two]:
        result.check()
