"""The list of changes that tests must notice (`scripts/mutants.py`) fits the code; how a change finds its place."""

from __future__ import annotations

import sys

import pytest
from harness import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))
import mutants

CODE = """
class Rate:
    def at(self, step):
        if step < self.warm:  # the first steps
            return self.base * (
                step / self.warm
            )
        log(f"{step + 1} of {self.warm}")
        return self.base

    def last(self):
        return self.base
"""


def made(at: str, old: str, new: str) -> str:
    return mutants.Mutant("a", f"rate.py::{at}", old, new, ()).made(CODE)


def test_every_change_can_be_made() -> None:
    found = mutants.mutants()
    assert mutants.problems(found) == []
    assert len(found) >= 80


@pytest.mark.parametrize(
    ("at", "old", "why"),
    [
        ("Rate", "self.base", "stands 3 times"),
        ("Rate.at", "self.top", "stands 0 times"),
        ("Rate.first", "self.base", "no first"),
        ("Rate.at", "step + 1", "stands 0 times"),  # within an f-string
    ],
)
def test_a_place_that_is_not_one(at: str, old: str, why: str) -> None:
    with pytest.raises(mutants.NotThere, match=why):
        made(at, old, "0")
