"""Models in stages on Horovod ranks and alone; the cases are in programs/torch/pipeline.py."""

from __future__ import annotations

import pytest
import torch_cases
from harness import PROGRAMS, Result, run_ranks

PROGRAM = PROGRAMS / "torch" / "pipeline.py"
CASES = torch_cases.names("pipeline.py")


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "2 ranks"])
def job(request: pytest.FixtureRequest) -> Result:
    return run_ranks([PROGRAM], request.param, timeout_s=200)


@pytest.mark.parametrize("case", CASES)
def test_stages(job: Result, case: str) -> None:
    assert case in torch_cases.passed(job.ranks_output[0]), job.text


def test_the_jobs_end_well(job: Result) -> None:
    job.check()


def test_a_stage_that_fails_on_one_rank_ends_all() -> None:
    result = run_ranks([PROGRAM.with_name("stage_that_fails.py")], 2)
    assert result.returncode != 0 and "trained to the end" not in result.text
    said = result.ranks_error[1]
    assert "rank 1: stage 2 of 2" in said and "ValueError: rank 1 has had enough" in said, result.text
    assert "Traceback" not in result.text
