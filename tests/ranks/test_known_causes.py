"""Runs of which it is known what takes their time: the verdict names it, and says that nothing stands out where nothing
does.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import PROGRAMS, run_ranks

VERDICTS = {
    "slow disk": "for data; ",  # all ranks', or that of the rank that reads a little later than the others
    "slow augmentation": "input bound: ",
    "straggler": "uneven ranks: ",
    "slow callbacks": " of the training is spent outside of its steps: ",
    "frequent saves": "checkpoint takes ",
    "evaluation heavy": "evaluation takes ",
    "compute heavy": "compute ",
    "tiny batches": "communication bound: ",
    "nothing stands out": "nothing stands out: ",
}


@pytest.mark.thorough
@pytest.mark.parametrize(("framework", "backend"), [("torch", ""), ("keras", "tensorflow"), ("keras", "torch")])
def test_the_verdict_names_the_known_cause(framework: str, backend: str, tmp_path: Path) -> None:
    program: list[str | Path] = [PROGRAMS / "core" / "known_causes.py", framework, str(tmp_path)]
    ended = run_ranks(program, 2, env={"KERAS_BACKEND": backend} if backend else {}, timeout_s=180).check()
    text = next(line for line in ended.out.splitlines() if '{"slow disk"' in line)
    found = json.loads(text[text.index("{") :])
    assert list(found) == [cause for cause in VERDICTS if framework == "torch" or cause != "tiny batches"]
    wrong = {cause: said for cause, said in found.items() if VERDICTS[cause] not in said}
    assert not wrong
    assert "waiting for rank 1" in found["straggler"]
    named = [cause for cause, said in found.items() if "checkpoint takes" in said or "evaluation takes" in said]
    assert named == ["frequent saves", "evaluation heavy"]
