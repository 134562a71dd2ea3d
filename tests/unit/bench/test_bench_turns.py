"""Jobs that take turns: one runs, the others stand still; nothing is left when they end, well or not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from harness import clean_environment

from hvdtrain.bench.turns.turns import InterleavedJobs


def test_an_address_needs_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Orders are pickled: only the bench's own jobs may connect."""
    with InterleavedJobs(clean_environment()) as jobs:
        assert oct(os.stat(jobs._folder.name).st_mode & 0o777) == "0o700"
