"""Programs of Keras cases that all ranks run: each has an outcome, "passed ..." or the text of what was raised."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterable
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import pytest
from harness import run_ranks

BACKENDS = [pytest.param("tensorflow", marks=pytest.mark.thorough), "torch"]
Outcomes = list[dict[str, str]]
Ran = Callable[[str], Outcomes]
T = TypeVar("T")


def each(
    cases: Iterable[str], on_tensorflow: Collection[str] = (), thorough: Collection[str] = ()
) -> pytest.MarkDecorator:
    """Parametrizes a test by backend and case. By default a case runs on one backend; the other is thorough.

    Args:
        cases: their names.
        on_tensorflow: cases of TensorFlow's graphs and data, and those that Keras on PyTorch rounds to float32. All
            others run on PyTorch, where Keras takes a quarter of the time.
        thorough: cases that are thorough on both.
    """
    marked = []
    for backend, case in product(("tensorflow", "torch"), cases):
        other = (case in on_tensorflow) != (backend == "tensorflow")
        marked.append(pytest.param(backend, case, marks=[pytest.mark.thorough] * (other or case in thorough)))
    return pytest.mark.parametrize(("backend", "case"), marked)


def by_backend(request: pytest.FixtureRequest, run: Callable[[str, list[str]], T]) -> Callable[[str], T]:
    """Returns a function that gives what `run` returned for a backend and the cases that the module's chosen tests
    name of it."""
    items: list[Any] = request.session.items
    params = [item.callspec.params for item in items if item.module is request.module and hasattr(item, "callspec")]

    @functools.cache
    def of(backend: str) -> T:
        return run(backend, sorted({its["case"] for its in params if "case" in its and its["backend"] == backend}))

    return of


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Runs the chosen cases of the module's `PROGRAM` on two ranks, once a backend; returns the outcomes of each."""
    program: Path = request.module.PROGRAM

    def run(backend: str, cases: list[str]) -> Outcomes:
        folder = tmp_path_factory.mktemp(program.stem)
        line: list[str | Path] = ["-W", "ignore", program, folder, *cases]
        run_ranks(line, 2, env={"KERAS_BACKEND": backend}, timeout_s=420).check()
        return [json.loads((folder / f"{program.stem}.rank{rank}.json").read_text()) for rank in range(2)]

    return by_backend(request, run)


def passed(outcomes: Outcomes, case: str, found: str = "") -> None:
    for rank, cases in enumerate(outcomes):
        assert cases[case].startswith(f"passed {found}"), f"rank {rank}: {cases[case]}"


def refused(outcomes: Outcomes, case: str, *texts: str) -> None:
    """By every rank, in an error of the first text's kind that says the others."""
    kind, *others = texts
    for rank, cases in enumerate(outcomes):
        assert cases[case].startswith(kind), f"rank {rank}: {cases[case]}"
        assert [text for text in others if text not in cases[case]] == [], f"rank {rank}: {cases[case]}"
