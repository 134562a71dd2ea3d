"""What the planner prints."""

from __future__ import annotations

import json

import pytest
from harness import PROGRAMS, run_ranks

PROGRAM = PROGRAMS / "pipeline" / "planner.py"


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict:
    """What one process said: several commands, a choice, a count of operations."""
    folder = tmp_path_factory.mktemp("plan")
    done = run_ranks([PROGRAM, folder], 1, launcher="none", timeout_s=120).check()
    return {"folder": folder} | {line["case"]: line for line in map(json.loads, done.out.splitlines())}
