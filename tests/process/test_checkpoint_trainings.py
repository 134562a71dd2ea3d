"""Two trainings of one directory, in eight orders, lose no checkpoint: one is refused, or each keeps its own."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from checkpoint_steps import restored, steps
from harness import PROGRAMS, REPOSITORY

PROGRAM = PROGRAMS / "core" / "two_trainings.py"
KEEP = 2


class Training:
    """A process that saves into the directory, or not yet one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None
        self.lineage: str | None = None  # what it has saved or restored

    def start(self) -> None:
        places = os.pathsep.join([str(REPOSITORY / "tests" / "support"), str(REPOSITORY)])
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(self.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=os.environ | {"PYTHONPATH": places},
        )  # fmt: skip
        self.lineage = None

    def ask(self, command: str) -> list[str]:
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().split()

    def end(self, *, kill: bool) -> None:
        if self.process is not None:
            if kill:
                self.process.kill()
            self.process.communicate(timeout=60)
            self.process = None


@pytest.mark.parametrize("order", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(3, 8))])
def test_two_trainings_of_one_directory_lose_no_checkpoint(order: int, tmp_path: Path) -> None:
    chance = random.Random(order)
    trainings = [Training(tmp_path), Training(tmp_path)]
    saved: dict[str, list[int]] = defaultdict(list)  # by training, oldest first
    owner: Training | None = None
    try:
        for step in range(1, 15):
            one = chance.choice(trainings)
            if one.process is None:
                one.start()
                if chance.random() < 0.5:
                    _, found = one.ask("restore")
                    newest = max((s for kept in saved.values() for s in kept), default=None)
                    assert found == str(newest)
                    if newest is not None:
                        one.lineage = next(name for name, kept in saved.items() if newest in kept)
                continue
            if chance.random() < 0.2:
                one.end(kill=chance.random() < 0.5)
                owner = None if owner is one else owner
                continue
            answer, *words = one.ask(f"save {step}")
            if owner not in (None, one):
                assert answer == "refused" and "in use by another process" in " ".join(words), (answer, words)
                continue
            assert answer == "saved", words
            owner = one
            one.lineage = one.lineage or f"made at {step}"
            saved[one.lineage].append(step)
            assert steps(tmp_path) == sorted(s for kept in saved.values() for s in kept[-KEEP:])
    finally:
        for one in trainings:
            one.end(kill=True)
    progress = restored(tmp_path)
    assert progress is not None and progress.step == max(s for kept in saved.values() for s in kept)
