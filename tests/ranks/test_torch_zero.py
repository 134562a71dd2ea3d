"""ZeRO stage 1: equal to one process."""

from __future__ import annotations

import pytest
import torch_cases
from harness import Result, run_ranks


@pytest.fixture(scope="module")
def two_ranks() -> Result:
    program = [str(torch_cases.FOLDER / "zero.py"), "deepspeed"]
    return run_ranks(program, 2, launcher="forked torchrun", env={"DS_ACCELERATOR": "cpu"}, timeout_s=240)


@pytest.mark.parametrize("case", torch_cases.names("zero.py"))
def test_two_ranks(case: str, two_ranks: Result) -> None:
    assert case in torch_cases.passed(two_ranks.out), two_ranks.text


def test_the_program_ends_well(two_ranks: Result) -> None:
    two_ranks.check()


@pytest.mark.thorough
def test_three_ranks_of_ddp() -> None:
    """The twin of two ranks, on the other engine."""
    program = [str(torch_cases.FOLDER / "zero.py"), "ddp", "three"]
    done = run_ranks(program, 3, launcher="forked torchrun", timeout_s=400).check()
    assert set(torch_cases.names("zero.py")) <= torch_cases.passed(done.out)
