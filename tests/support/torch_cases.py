"""Programs of many cases: each is a function ``case_...``; one start of the ranks runs all, each is a test."""

from __future__ import annotations

import re

from harness import PROGRAMS

FOLDER = PROGRAMS / "torch"


def names(program: str) -> list[str]:
    """Return the cases of a program, without importing it."""
    return re.findall(r"^def (case_\w+)", (FOLDER / program).read_text(encoding="utf-8"), re.MULTILINE)


def passed(output: str) -> set[str]:
    """Return the cases that said they passed (see `programs/torch/cases.py`)."""
    return set(re.findall(r"passed (case_\w+)", output))
