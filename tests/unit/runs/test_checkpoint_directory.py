"""A checkpoint directory belongs to one training: to its model, in its place."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from blob import Blob
from checkpoint_steps import progress_at, step_of, steps, synchronous

from hvdtrain import Checkpointer, CheckpointError
from hvdtrain.checkpoint import checkpoint_folder

OTHER_MODEL = "belongs to one training: this model must not save there"
IN_USE = "belongs to one training at a time"


class Model:
    """What a part may hold of a user's."""


class Weights(Blob):
    """A part that knows its model."""

    def __init__(self, model: Model) -> None:
        super().__init__(b"weights")
        self.model = model

    @property
    def trained(self) -> object:
        return self.model


def train(checkpoints: Checkpointer, model: Model, step: int) -> Path:
    return checkpoints.save({"model.bin": Weights(model)}, progress=progress_at(step))


def restore(folder: Path, model: Model) -> int:
    return step_of(synchronous(folder).restore({"model.bin": Weights(model)}))


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path)


class TestModels:
    @pytest.mark.parametrize("first_is_gone", [False, True])
    def test_a_second_model_is_refused(self, tmp_path: Path, first_is_gone: bool) -> None:
        """Whether or not the first one has been collected: k-fold in a loop may, or may not, hold it."""
        checkpoints, first, second = synchronous(tmp_path, keep=1), Model(), Model()
        train(checkpoints, first, 1)
        if first_is_gone:
            del first
            gc.collect()
            checkpoints.save({"extra.bin": Blob()}, progress=progress_at(2))  # of no model: lets no other one in
        before = steps(tmp_path)
        for again in (checkpoints, synchronous(tmp_path, keep=1)):
            with pytest.raises(CheckpointError, match=OTHER_MODEL) as caught:
                train(again, second, 3)
            assert f"{tmp_path} has the checkpoints of another model" in caught.value.received
            assert "Checkpointer('checkpoints/fold-2')" in caught.value.remedy
            assert steps(tmp_path) == before
        if not first_is_gone:
            train(checkpoints, first, 4)
            assert steps(tmp_path) == [4], "the first one goes on"

    def test_the_same_model_saves_through_any_checkpointer_of_the_directory(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        model, student = Model(), Model()
        for step, name in enumerate(("real", "link", "real"), 1):
            train(synchronous(tmp_path / name), model, step)
        both = {"model.bin": Weights(model), "teacher.bin": Weights(student)}
        synchronous(tmp_path / "real", keep=9).save(both, progress=progress_at(4))
        train(synchronous(tmp_path / "real", keep=9), student, 5)  # which has been saved there, beside the model
        assert steps(tmp_path / "real") == [1, 2, 3, 4, 5]

    @pytest.mark.parametrize("copy_is_gone", [False, True])
    def test_a_copy_that_is_evaluated_does_not_lock_the_training_out(self, tmp_path: Path, copy_is_gone: bool) -> None:
        checkpoints, model, copy = synchronous(tmp_path), Model(), Model()
        train(checkpoints, model, 1)
        assert restore(tmp_path, copy) == 1
        if copy_is_gone:
            del copy
            gc.collect()
        train(checkpoints, model, 2)
        assert steps(tmp_path) == [1, 2]

    def test_a_teacher_does_not_lock_out_the_model_that_goes_on(self, tmp_path: Path) -> None:
        save_of_a_run_before(tmp_path)
        teacher, student, stranger = Model(), Model(), Model()
        assert restore(tmp_path, teacher) == restore(tmp_path, student) == 1
        train(synchronous(tmp_path), student, 2)
        with pytest.raises(CheckpointError, match=OTHER_MODEL):
            train(synchronous(tmp_path), stranger, 3)
        train(synchronous(tmp_path), teacher, 4)  # it has restored, too
        assert steps(tmp_path) == [1, 2, 4]

    @pytest.mark.parametrize("away", [moved, shutil.rmtree, emptied])
    @pytest.mark.parametrize("kept", [True, False])
    def test_where_nothing_of_the_first_model_is_left_another_may_save(
        self, tmp_path: Path, away: Callable[[Path], object], kept: bool
    ) -> None:
        """k-fold that clears, or moves, the directory after each fold; with a Checkpointer for each fold, or one."""
        folder, checkpoints = tmp_path / "checkpoints", synchronous(tmp_path / "checkpoints")
        first = Model()
        train(checkpoints, first, 1)
        away(folder)
        if not kept:
            checkpoints = synchronous(folder)
            gc.collect()
        train(checkpoints, Model(), 2)
        assert steps(folder) == [2] and len({info.training for info in checkpoints.list()}) == 1
        with pytest.raises(CheckpointError, match=OTHER_MODEL):
            train(checkpoints, first, 3)


def save_of_a_run_before(folder: Path) -> None:
    """Leaves a checkpoint as another program would: this one knows nothing of it."""
    elsewhere = folder / "elsewhere"
    train(synchronous(elsewhere), Model(), 1).rename(folder / "epoch-0000-step-000001")
    elsewhere.rmdir()


class TestPlace:
    """The directory is moved away, or deleted, while the training runs."""

    @pytest.mark.parametrize("away", [moved, shutil.rmtree])
    def test_the_next_save_makes_it_anew_and_takes_it(self, tmp_path: Path, away: Callable[[Path], object]) -> None:
        folder, model = tmp_path / "checkpoints", Model()
        one, other = synchronous(folder), synchronous(folder)
        train(one, model, 1)
        train(other, model, 2)
        away(folder)
        train(one, model, 3)
        assert checkpoint_folder.is_taken(folder)
        train(other, model, 4)  # by a Checkpointer that has taken what is gone
        train(one, model, 5)
        assert steps(folder) == [3, 4, 5] and checkpoint_folder.is_taken(folder)
        if away is moved:
            assert steps(tmp_path / "moved") == [1, 2]
            assert not checkpoint_folder.is_taken(tmp_path / "moved"), "it is given back"

    @pytest.mark.parametrize("away", [moved, shutil.rmtree])
    def test_what_another_training_has_made_in_its_place_is_not_written_to(
        self, tmp_path: Path, away: Callable[[Path], object]
    ) -> None:
        folder, model = tmp_path / "checkpoints", Model()
        checkpoints = synchronous(folder)
        train(checkpoints, model, 1)
        away(folder)
        folder.mkdir()
        theirs = checkpoint_folder.Lock(folder)
        for again in (checkpoints, synchronous(folder)):
            with pytest.raises(CheckpointError, match=IN_USE) as caught:
                train(again, model, 2)
            assert f"{folder} is in use by another process" in caught.value.received
            assert "give another directory" in caught.value.remedy
            assert list(folder.iterdir()) == []
        del theirs
        train(checkpoints, model, 3)
        assert steps(folder) == [3]
