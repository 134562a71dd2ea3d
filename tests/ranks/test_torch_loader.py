"""Loader, augmentation, decoding and evaluation in one process: a test a case of the programs, one launch a program."""

from __future__ import annotations

import functools

import pytest
from harness import PROGRAMS, run_ranks
from limits import Limit
from passing import names_of, verdict_on

FOLDER = PROGRAMS / "torch"
PARTS = ("loader_alone.py", "inputs.py", "orders.py")
CASES = [(program, name) for program in PARTS for name in names_of(FOLDER / program)]


@functools.cache
def output_of(program: str) -> str:
    done = run_ranks(["-W", "ignore", FOLDER / program], 1, timeout_s=150).check()
    return done.out + done.err


@pytest.mark.parametrize(("program", "name"), CASES, ids=[name.removeprefix("case_") for _, name in CASES])
def test_case(program: str, name: str) -> None:
    problem = verdict_on(name, output_of(program))
    assert not problem, problem


def test_no_workers_are_left_behind() -> None:
    """The program ends without a word to them (`os._exit`), and the harness found nobody afterwards."""
    assert "left 2 workers" in output_of("loader_alone.py")


def test_unreadable_files_are_named_as_they_come() -> None:
    lines = output_of("loader_alone.py").splitlines()
    assert "hvdtrain: rank 0 skips file 3: broken" in lines
    assert not any("file 8: broken" in line for line in lines)  # after a few, the list at the end must do


def test_limits_of_the_loader_alone(limit: Limit) -> None:
    for row, attack, name, now in (
        (
            "T3", "a `TensorDataset` with a `__getitem__` of its own, `collate=` for arrays",
            "case_collate_and_getitem_of_the_users_are_called", "both are called",
        ),
        (
            "T5", "workers never see that the data set was changed between epochs",
            "case_workers_see_the_data_set_as_it_is_and_end", "the same with and without workers: 1, 2, 3",
        ),
        (
            "T19a", "a RuntimeError in a data set or collate function is blamed on the out-of-memory killer",
            "case_errors_of_the_data_set_come_through", "the error as it is, and the sample's index",
        ),
        ("T19b", "batches that are a `defaultdict`", "case_dictionaries_of_all_kinds", "stay what they are"),
    ):  # fmt: skip
        problem = verdict_on(name, output_of("loader_alone.py"))
        assert not problem, problem
        limit(row, attack, mended=now)


def test_a_worker_whose_rank_is_killed_right_after_the_fork_ends() -> None:
    program = PROGRAMS / "torch" / "worker_of_the_dead.py"
    assert "the worker has ended" in run_ranks([program], 1, timeout_s=60).check().out
