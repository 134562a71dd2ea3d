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


def test_layout_does_not_matter() -> None:
    changed = made("Rate.at", "self.base*(step/self.warm)", "step")
    assert changed == CODE.replace("self.base * (\n                step / self.warm\n            )", "step")


def test_an_expression_stays_one() -> None:
    assert "(step or 1) / self.warm" in made("Rate.at", "step / self.warm", "(step or 1) / self.warm")
    assert "return self.base * (\n                (1 or step)\n" in made("Rate.at", "step / self.warm", "1 or step")


def test_statements_go_come_and_leave_a_body() -> None:
    assert "log" not in made("Rate.at", 'log(f"{step + 1} of {self.warm}")', "")
    assert "        step -= 1\n        return self.base\n" in made(
        "Rate.last", "return self.base", "step -= 1\nreturn self.base"
    )
    assert made("Rate.last", "return self.base", "").endswith("        pass\n")


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


def test_what_changes_nothing_is_no_change() -> None:
    with pytest.raises(mutants.NotThere, match="nothing"):
        made("Rate.last", "self.base", "self.base")


def test_other_files_are_changed_as_text() -> None:
    change = mutants.Mutant("a", "run.sh", "set -e", "set +e", ())
    assert change.made("#!/bin/sh\nset -e\n") == "#!/bin/sh\nset +e\n"
    with pytest.raises(mutants.NotThere, match="2 times"):
        change.made("set -e; set -e")
