"""Programs of Keras cases that all ranks run: each has an outcome, "passed ..." or the text of what was raised."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import Result, chosen_cases, run_ranks

BACKENDS = ["tensorflow", pytest.param("torch", marks=pytest.mark.thorough)]
Outcomes = list[dict[str, str]]


def ran(
    program: Path, request: pytest.FixtureRequest, folders: pytest.TempPathFactory, backend: str, size: int = 2,
    flags: Sequence[str] = (),
) -> tuple[Result, Outcomes]:  # fmt: skip
    """Runs the cases that the module's tests name; returns the outcomes of each rank."""
    folder = folders.mktemp(program.stem)
    line: list[str | Path] = [*flags, program, folder, *chosen_cases(request)]
    ended = run_ranks(line, size, env={"KERAS_BACKEND": backend}, timeout_s=420).check()
    return ended, [json.loads((folder / f"{program.stem}.rank{rank}.json").read_text()) for rank in range(size)]


def passed(outcomes: Outcomes, case: str, found: str = "") -> None:
    for rank, cases in enumerate(outcomes):
        assert cases[case].startswith(f"passed {found}"), f"rank {rank}: {cases[case]}"


def refused(outcomes: Outcomes, case: str, *texts: str) -> None:
    """By every rank, in an error of the first text's kind that says the others."""
    kind, *others = texts
    for rank, cases in enumerate(outcomes):
        assert cases[case].startswith(kind), f"rank {rank}: {cases[case]}"
        assert [text for text in others if text not in cases[case]] == [], f"rank {rank}: {cases[case]}"
