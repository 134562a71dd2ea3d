"""Buckets of gradients on real Horovod ranks; the cases are in programs/torch/reducer.py."""

from __future__ import annotations

import pytest
from harness import PROGRAMS, Result, run_ranks

PROGRAM = PROGRAMS / "torch" / "reducer.py"
CASES = (
    "sums_over_ranks", "accumulates_before_it_sums", "gradients_on_some_ranks_only",
    "used_in_an_earlier_micro_batch_only", "freezing_and_unfreezing_is_noticed", "stages_send_in_their_last_pass",
    "shared_weights_and_other_layouts", "mixed_types_and_half_precision_on_the_way", "refusals", "buckets",
    "bytes_and_floats",
)  # fmt: skip


@pytest.fixture(scope="module", params=["horovodrun 2", "mpirun 3"])
def job(request: pytest.FixtureRequest) -> tuple[Result, int]:
    launcher, ranks = request.param.split()
    return run_ranks([PROGRAM], int(ranks), launcher=launcher, timeout_s=120), int(ranks)


@pytest.mark.parametrize("case", CASES)
def test_reducer(job: tuple[Result, int], case: str) -> None:
    result, ranks = job
    assert all(f"passed {case}\n" in f"{result.ranks_output.get(rank)}\n" for rank in range(ranks)), result.text


def test_no_case_is_forgotten(job: tuple[Result, int]) -> None:
    result, _ = job
    assert result.check().ranks_output[0].splitlines() == [f"passed {case}" for case in CASES]
