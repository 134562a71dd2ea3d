"""A week of failures in minutes: a training that is broken in random ways, and started again each time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import PROGRAMS, run_ranks

EXACT = 1e-10


@pytest.mark.thorough
@pytest.mark.parametrize("faults", [20, 500])
def test_it_ends_as_the_unbroken_training_does(faults: int, tmp_path: Path) -> None:
    done = run_ranks(
        [PROGRAMS / "week" / "week.py", tmp_path, str(faults)], 1, launcher="none", timeout_s=120 + 20 * faults
    ).check()
    found = json.loads(done.out.splitlines()[-1])
    assert found["faults"] == faults and found["gap"] < EXACT and found["right"][0] == found["right"][1], done.text
    print(done.out)
