"""The list of changes that tests must notice (`scripts/mutants.py`) fits the code; one of them is tried."""

from __future__ import annotations

import subprocess
import sys

import pytest
from harness import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))
import mutants

LIST = mutants.mutants()


@pytest.mark.thorough
def test_a_change_that_is_noticed_and_one_that_is_not() -> None:
    change = next(mutant for mutant in LIST if mutant.name == "lr-linear-is-sqrt")
    nothing = mutants.Mutant("lr-nothing", change.at, change.old, f"({change.old})", change.tests)
    assert mutants.judge("a", change, change.tests, 60).verdict == "killed"
    assert mutants.judge("b", nothing, change.tests, 60).verdict == "survived"


@pytest.mark.thorough
@pytest.mark.slow
def test_95_of_100_changes_are_noticed() -> None:
    done = subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / "mutants.py", "--jobs", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
