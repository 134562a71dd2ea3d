"""Ranks that come at different times: the engine starts when all are there, and who does not come is named."""

from __future__ import annotations

import pytest
from harness import PROGRAMS, Result, run_ranks, together

from hvdtrain.core import variables

LATE = PROGRAMS / "core" / "late.py"


def check_late(framework: str) -> Result:
    """Horovod would end this job after 5 s."""
    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "5", "KERAS_BACKEND": "tensorflow"}
    done = run_ranks([LATE, framework, "7"], 2, launcher="horovodrun", env=env).check()
    assert [done.ranks_output[rank] for rank in range(2)] == ["together: [0, 1]"] * 2, done.text
    return done


def test_a_rank_that_comes_late_and_one_that_does_not_come() -> None:
    _, done = together(
        lambda: check_late("torch"),
        lambda: run_ranks([LATE, "torch", "60"], 2, launcher="horovodrun", env={variables.START_TIMEOUT_S: "1"}),
    )
    assert done.returncode != 0 and done.seconds < 45
    assert "all 2 ranks must start within 1 s" in done.ranks_error[0], done.text
    assert "rank 1 did not arrive, rank 0 reports" in done.ranks_error[0]


@pytest.mark.thorough
def test_a_rank_that_ends_before_it_comes() -> None:
    ended = run_ranks([LATE, "torch", "ends"], 2, launcher="mpirun", env={variables.START_TIMEOUT_S: "3"})
    assert ended.returncode != 0 and "all 2 ranks must start within 3 s" in ended.ranks_error[0], ended.text


@pytest.mark.thorough
def test_a_rank_of_keras_that_comes_late() -> None:
    check_late("keras")
