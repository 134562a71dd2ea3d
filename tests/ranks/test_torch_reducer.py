"""Buckets of gradients on real Horovod ranks; the cases are in programs/torch/reducer.py."""

from __future__ import annotations

import pytest
import torch_cases
from harness import Result, run_ranks


@pytest.fixture(scope="module", params=["forked 2", pytest.param("mpirun 3", marks=pytest.mark.thorough)])
def job(request: pytest.FixtureRequest) -> tuple[Result, int]:
    launcher, ranks = request.param.split()
    return run_ranks([torch_cases.FOLDER / "reducer.py"], int(ranks), launcher=launcher, timeout_s=120), int(ranks)


@pytest.mark.parametrize("case", torch_cases.names("reducer.py"))
def test_reducer(job: tuple[Result, int], case: str) -> None:
    result, ranks = job
    for rank in range(ranks):
        lines = result.ranks_output.get(rank, "").splitlines()
        assert {f"passed {case}", f"passed {case}, where they lie"} <= {*lines}, result.text


def test_the_program_ends_well(job: tuple[Result, int]) -> None:
    job[0].check()
