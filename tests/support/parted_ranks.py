"""What ranks that part are told, and how soon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness import Result, run_ranks, together

NAMED_WITHIN_S = 10.0
RULE = "every rank must come to the same collective operation"
# each ends the job; the text that names what rank 1 does
ENDING = {
    "save_on_rank_0": "in update 1 of model 1",
    "one_continues": "at the end of out_of_step.py",
    "one_breaks": "in gather",
    "uneven_loader": "at the end of out_of_step.py",
    "one_trains_more": "in update 7 of model 1",
    "one_ends_early.atexit": "at the end of out_of_step.py",
    "one_prepares_more": "in gather",
}


def start(program: Path, arguments: list[str], folder: Path, launcher: str = "forked", **env: str) -> Result:
    """Runs two ranks, which write into the folder when they part and while they live."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {"HVDTRAIN_TEST_BEACON": str(folder), **env}
    return run_ranks([program, *arguments], 2, launcher=launcher, env=environment, timeout_s=150)


def two_at_a_time(*runs: Callable[[], Result]) -> list[Result]:
    """Each job is two processes that mostly wait."""
    found: list[Result] = []
    for first in range(0, len(runs), 2):
        found += together(*runs[first : first + 2])
    return found
