"""Callbacks of Keras that write files write on rank 0 only, also a user's subclass; BackupAndRestore is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import PROGRAMS, run_ranks
from limits import Limit


@pytest.mark.parametrize("backend", ["tensorflow", pytest.param("torch", marks=pytest.mark.thorough)])
def test_callbacks_write_on_rank_0(backend: str, tmp_path: Path, limit: Limit) -> None:
    program = [PROGRAMS / "keras" / "writes.py", tmp_path]
    done = run_ranks(program, 2, env={"KERAS_BACKEND": backend}, timeout_s=150).check()
    written = {path.name for path in tmp_path.iterdir()}
    board = {"board0"} if backend == "tensorflow" else set()
    assert written == board | {
        "rank0-1.keras", "rank0-2.keras", "mine0.weights.h5", "log0.csv", "own0.keras", "own1.keras",
    }  # fmt: skip
    if board:
        assert {"train", "projector_config.pbtxt"} <= {path.name for path in (tmp_path / "board0").iterdir()}
    best = {rank: text.split("best ")[1].splitlines()[0].split(" ", 1)[1] for rank, text in done.ranks_output.items()}
    assert best[0] == best[1] != "[]", "what a ModelCheckpoint counts is equal on all ranks"
    refused = "BackupAndRestore cannot resume a training on several ranks"
    assert all(f"refused {refused}" in text for text in done.ranks_output.values())
    if backend == "tensorflow":
        limit("K24", "ModelCheckpoint, CSVLogger and TensorBoard on all ranks", mended="rank 0 alone writes")
        limit("K26", "BackupAndRestore on all ranks", refused=refused)
