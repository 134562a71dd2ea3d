"""What is saved when ranks were preempted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from blob import Blob

from hvdtrain import Checkpointer, Preempted, Progress
from hvdtrain.checkpoint.parts import Part, Saver, end_if_preempted
from hvdtrain.world.world import World


class Trained(Blob):
    """A part that knows where training stands."""

    at = Progress(step=1)
    saver: Saver | None = None

    @property
    def progress(self) -> Progress:
        return self.at

    def saved_by(self, saver: Saver) -> None:
        self.saver = saver


@dataclass
class Training:
    preempted: bool
    saver: Saver | None


@pytest.fixture
def part() -> Trained:
    return Trained(b"weights")


def ends(part: Trained, capsys: pytest.CaptureFixture[str]) -> str:
    """It ends; returns what was said."""
    with pytest.raises(Preempted):
        end_if_preempted([Training(False, None), Training(True, part.saver)], World.solo())
    return capsys.readouterr().out


def steps(folder: Path) -> list[int]:
    return sorted(info.progress.step for info in Checkpointer(folder, asynchronous=False).list())


def test_it_saves_as_the_last_time(part: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Checkpointer(tmp_path, asynchronous=False).save({"blob": part}, progress=part.progress)
    part.at = Progress(step=2)
    assert "preempted: saved in" in ends(part, capsys)
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("restored", [False, True])
def test_what_is_saved_already_is_not_saved_twice(
    restored: bool, part: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state: dict[str, Part] = {"blob": part}
    Checkpointer(tmp_path, asynchronous=False).save(state, progress=part.progress)
    if restored:
        part.saver = None
        Checkpointer(tmp_path, asynchronous=False).restore(state)
    assert f"is in {tmp_path}" in ends(part, capsys)
    assert steps(tmp_path) == [1]


def test_a_state_can_be_told_before(part: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Checkpointer(tmp_path, asynchronous=False).on_preemption({"blob": part})
    assert "saved in" in ends(part, capsys) and steps(tmp_path) == [1]


def test_without_a_checkpointer_it_ends_and_says_so(part: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing was saved, which takes checkpoints.on_preemption(state)" in ends(part, capsys)
