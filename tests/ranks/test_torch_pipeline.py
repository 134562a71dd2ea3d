"""Models in stages on Horovod ranks and alone; the cases are in programs/torch/pipeline.py."""

from __future__ import annotations

import pytest
import torch_cases
from harness import PROGRAMS, Result, run_ranks

PROGRAM = PROGRAMS / "torch" / "pipeline.py"
CASES = torch_cases.names("pipeline.py")


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.thorough), 2], ids=["alone", "2 ranks"])
def job(request: pytest.FixtureRequest) -> Result:
    return run_ranks([PROGRAM], request.param, timeout_s=200)


@pytest.mark.parametrize("case", CASES)
def test_stages(job: Result, case: str) -> None:
    assert case in torch_cases.passed(job.ranks_output[0]), job.text


def test_the_jobs_end_well(job: Result) -> None:
    job.check()
