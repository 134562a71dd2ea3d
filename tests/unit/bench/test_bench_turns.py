"""Jobs that take turns: one runs, the others stand still; nothing is left when they end, well or not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from harness import clean_environment

from hvdtrain.bench import turns
from hvdtrain.bench.turns import InterleavedJobs
from hvdtrain.core.errors import HvdtrainError


def test_a_job_over_its_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """That nothing is left behind is what the suite checks after every test."""
    monkeypatch.setattr(turns, "READY_WITHIN_S", 0.3)
    monkeypatch.setattr(turns, "END_WITHIN_S", 0.3)
    with InterleavedJobs(clean_environment()) as jobs, pytest.raises(HvdtrainError, match="it took too long"):
        jobs.start("arm", [sys.executable, "-c", "import time; time.sleep(60)"], 1)


def test_an_address_needs_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Orders are pickled: only the bench's own jobs may connect."""
    with InterleavedJobs(clean_environment()) as jobs:
        assert oct(os.stat(jobs._folder.name).st_mode & 0o777) == "0o700"
