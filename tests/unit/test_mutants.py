"""The list of changes that tests must notice (`scripts/mutants.py`) fits the code; one of them is tried."""

from __future__ import annotations

import sys

from harness import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))
import mutants

LIST = mutants.mutants()


def test_every_change_can_be_made() -> None:
    assert mutants.problems(LIST) == []
    assert len(LIST) >= 80
