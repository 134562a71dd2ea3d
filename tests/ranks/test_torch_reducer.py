"""Buckets of gradients on real Horovod ranks; the cases are in programs/torch/reducer.py."""

from __future__ import annotations

import pytest
from harness import PROGRAMS, Result, run_ranks

PROGRAM = PROGRAMS / "torch" / "reducer.py"
CASES = (
    "sums_over_ranks", "accumulates_before_it_sums", "gradients_on_some_ranks_only",
    "used_in_an_earlier_micro_batch_only", "freezing_and_unfreezing_is_noticed", "stages_send_in_their_last_pass",
    "shared_weights_and_other_layouts", "gradients_that_share_memory", "gradients_in_memory_of_others",
    "a_layout_that_one_rank_changes", "a_gradient_that_lies_otherwise", "what_the_user_keeps_stays",
    "mixed_types_and_half_precision_on_the_way", "refusals", "buckets", "bytes_and_floats",
)  # fmt: skip


@pytest.fixture(scope="module", params=["forked 2", "mpirun 3"])
def job(request: pytest.FixtureRequest) -> tuple[Result, int]:
    launcher, ranks = request.param.split()
    return run_ranks([PROGRAM], int(ranks), launcher=launcher, timeout_s=120), int(ranks)


@pytest.mark.parametrize("case", CASES)
def test_reducer(job: tuple[Result, int], case: str) -> None:
    result, ranks = job
    for rank in range(ranks):
        lines = result.ranks_output.get(rank, "").splitlines()
        assert {f"passed {case}", f"passed {case}, where they lie"} <= {*lines}, result.text


def test_no_case_is_forgotten(job: tuple[Result, int]) -> None:
    result, _ = job
    ways = ("", ", where they lie")
    assert result.check().ranks_output[0].splitlines() == [f"passed {case}{way}" for way in ways for case in CASES]
