"""Nothing lost: kills, full disks, flipped bits, other directories, other ranks."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import PROGRAMS, quick_folder
from hypothesis import given
from hypothesis import strategies as st
from limits import Limit

from hvdtrain import CheckpointError, ConfigError, NonFiniteError, Progress
from hvdtrain.checkpoint import checkpoint_folder
from hvdtrain.checkpoint.checkpoint_files import MANIFEST, read_manifest, write_manifest
from hvdtrain.checkpoint.staging import StateFile

sys.path.insert(0, str(PROGRAMS))
from blob import Blob, state_of
from checkpoint_steps import progress_at, restored, save, step_of, steps, synchronous


class TestSaveAndRestore:
    def test_round_trip(self, tmp_path: Path) -> None:
        path = save(tmp_path / "deep" / "down", 42, 0.5)
        assert path.name == "epoch-0004-step-000042"
        assert restored(tmp_path / "deep" / "down") == progress_at(42)

    def test_manifest(self, tmp_path: Path) -> None:
        manifest = json.loads((save(tmp_path, 7, math.nan) / MANIFEST).read_text(), parse_constant=pytest.fail)
        assert set(manifest["files"]) == {"a.bin", "b.bin"}
        assert manifest["files"]["a.bin"]["bytes"] == 100 and len(manifest["files"]["a.bin"]["sha256"]) == 64
        assert manifest["metrics"] == {"val_loss": "nan"} and manifest["world_size"] == 1
        assert math.isnan(synchronous(tmp_path).list()[0].metrics["val_loss"])

    @pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
    def test_files_have_the_permissions_that_the_umask_gives(self, tmp_path: Path, umask: int, limit: Limit) -> None:
        class Made(Blob):
            def write(self, file: StateFile) -> None:
                file.write(b"x")

        before = os.umask(umask)
        try:
            path = synchronous(tmp_path).save({"a.bin": Made(), "b.bin": Blob()}, progress=Progress())
        finally:
            os.umask(before)
        modes = {entry.name: entry.stat().st_mode & 0o777 for entry in path.iterdir()}
        assert modes == dict.fromkeys(("a.bin", "b.bin", MANIFEST), 0o666 & ~umask)
        limit("K11d", "model.safetensors is 0600, other files of a checkpoint 0644", mended="all as the umask has it")

    def test_what_cannot_be_loaded_names_the_rank(self, tmp_path: Path) -> None:
        class Refusing(Blob):
            def load(self, path: Path) -> None:
                raise ValueError("shape (3,) is not (4,)")

        save(tmp_path, 1)
        with pytest.raises(CheckpointError, match="able to load") as caught:
            synchronous(tmp_path).restore({"a.bin": Refusing()})
        assert "rank 0: ValueError: shape (3,) is not (4,)" in caught.value.received

    @pytest.mark.parametrize("name", ["../x", "a/b", "/etc/x", MANIFEST, ".hidden", "", ".", ".."])
    def test_names_that_are_not_plain(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ConfigError, match="plain file names"):
            synchronous(tmp_path).save({name: Blob()}, progress=Progress())


class TestRetention:
    @given(
        losses=st.lists(st.sampled_from([0.1, 0.2, 0.3, math.nan, None]), min_size=1, max_size=8),
        keep=st.integers(1, 4),
        mode=st.sampled_from(["min", "max"]),
    )
    def test_the_newest_and_the_best(self, losses: list[float | None], keep: int, mode: str) -> None:
        with quick_folder() as folder:
            self.save_all(folder, losses, keep, mode)

    def save_all(self, folder: Path, losses: list[float | None], keep: int, mode: str) -> None:
        best: tuple[float, int] | None = None
        for step, loss in enumerate(losses, start=1):
            save(folder, step, loss, keep=keep, mode=mode)
            if loss is not None and math.isfinite(loss):
                value = loss if mode == "min" else -loss
                best = min(best or (math.inf, 0), (value, -step))  # the newer of equals
            expected = set(range(max(1, step - keep + 1), step + 1)) | ({-best[1]} if best else set())
            assert set(steps(folder)) == expected
            assert step_of(restored(folder)) == step
            if best:
                assert step_of(restored(folder, which="best", mode=mode)) == -best[1]

    def test_a_directory_that_is_taken(self, tmp_path: Path) -> None:
        held = checkpoint_folder.Lock(tmp_path)
        with pytest.raises(CheckpointError, match="one training at a time") as caught:
            checkpoint_folder.Lock(tmp_path)
        assert f"{tmp_path} is in use by another process" in caught.value.received
        assert checkpoint_folder.is_taken(tmp_path)
        del held
        assert not checkpoint_folder.is_taken(tmp_path), "the twin: a lock that is given back"

    def test_a_missing_best_metric_is_reported_once(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        checkpoints = synchronous(tmp_path)
        checkpoints.save(state_of(1), progress=progress_at(1))
        assert capsys.readouterr().err == "", "a program that gives no metrics"
        for step in (2, 3):
            checkpoints.save(state_of(step), progress=progress_at(step), metrics={"loss": 0.1})
        error = capsys.readouterr().err
        assert error.count("no best checkpoint is kept: save() got the metrics 'loss', and not 'val_loss'") == 1
        assert "best='loss'" in error
        synchronous(tmp_path, best="loss").save(state_of(4), progress=progress_at(4), metrics={"loss": 0.1})
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize(
        ("names", "greater"),
        [
            ("val_accuracy top1 top5 auc_2 precision recall f1_score val_mean_io_u mAP r2_score acc1 roc_auc", True),
            ("loss val_head_loss top5_error mean_squared_error perplexity word_error_rate kl_divergence", False),
        ],
    )
    def test_the_name_of_a_metric_says_which_way_is_better(
        self, tmp_path: Path, names: str, greater: bool, limit: Limit
    ) -> None:
        for name in names.split():
            folder = tmp_path / name
            for step, value in enumerate((0.1, 0.9, 0.8), start=1):
                checkpoints = synchronous(folder, keep=1, best=name)
                checkpoints.save(state_of(step), progress=progress_at(step), metrics={name: value})
            assert steps(folder) == ([2, 3] if greater else [1, 3]), name
        if greater:
            limit("K10a", 'Checkpointer(best="val_accuracy") keeps the worst of 0.1, 0.9, 0.8', mended="0.9 is kept")

    @pytest.mark.parametrize(
        "name", ["score", "seconds", "neg_mean_squared_error", "negative_log_likelihood", "train_neg_loss", "lr"]
    )
    def test_a_name_that_does_not_say_is_refused(self, tmp_path: Path, name: str, limit: Limit) -> None:
        with pytest.raises(ConfigError, match="which way its metric is better") as caught:
            synchronous(tmp_path, best=name)
        assert 'mode="max"' in caught.value.remedy
        assert synchronous(tmp_path, best=name, mode="max").folder.mode == "max"
        if name == "score":
            limit("K10b", 'best="score": more or less?', refused=caught.value)

    def test_what_is_not_finite_is_not_written_and_nothing_is_deleted(self, tmp_path: Path) -> None:
        class Diverged(Blob):
            def collect(self) -> None:
                raise NonFiniteError("weights that are not finite are not saved")

        for step in (1, 2):
            save(tmp_path, step, keep=1)
        for step in (3, 4, 5):
            with pytest.raises(NonFiniteError):
                synchronous(tmp_path, keep=1).save({"a.bin": Diverged()}, progress=progress_at(step))
        assert steps(tmp_path) == [2] and step_of(restored(tmp_path)) == 2

    def test_after_going_back_the_newest_is_the_last_saved(self, tmp_path: Path) -> None:
        """A run restored from step 10 saves step 12: that one is the latest, whatever 20 was."""
        for step in (10, 20, 12):
            save(tmp_path, step, keep=2)
        assert step_of(restored(tmp_path)) == 12
        assert steps(tmp_path) == [20, 12]

    def test_the_same_step_again(self, tmp_path: Path) -> None:
        first, second = save(tmp_path, 5), save(tmp_path, 5)
        assert second.name == f"{first.name}.2" and synchronous(tmp_path).latest().path == second  # type: ignore[union-attr]
        assert save(tmp_path, 6, keep=1).exists() and not first.exists() and not second.exists()

    def test_damaged_ones_do_not_count_and_stay(self, tmp_path: Path) -> None:
        save(tmp_path, 1, keep=2)
        (save(tmp_path, 2, keep=2) / "a.bin").write_bytes(b"short")
        save(tmp_path, 3, keep=2)
        assert [info.progress.step for info in synchronous(tmp_path).list() if info.ok] == [1, 3]
        save(tmp_path, 4, keep=2)
        assert steps(tmp_path) == [2, 3, 4]


class TestDamage:
    """Whatever happens to the newest, the answer is its exact content or the one before; never an error."""

    def test_every_bit_flip(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        save(tmp_path, 1)
        newest = save(tmp_path, 2)
        fallbacks = 0
        for name in (MANIFEST, "a.bin", "b.bin"):
            whole = (newest / name).read_bytes()
            for position in range(len(whole)):
                flipped = bytearray(whole)
                flipped[position] ^= 1 << position % 8
                (newest / name).write_bytes(flipped)
                step = step_of(restored(tmp_path))
                told = "falling back" in capsys.readouterr().err
                assert told == (step == 1), "a fall-back is said"
                assert step == 1 or name == MANIFEST, f"{name} byte {position}: damage not seen"
                fallbacks += step == 1
            (newest / name).write_bytes(whole)
        assert fallbacks > 200 + 300  # white space of the manifest may change, nothing else
        assert step_of(restored(tmp_path)) == 2

    @pytest.mark.parametrize("reason", [errno.EIO, "a newer format"])
    def test_what_cannot_be_read_is_kept(
        self, tmp_path: Path, reason: int | str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def unreadable(step: int) -> None:
            path = tmp_path / f"epoch-0000-step-{step:06d}"
            if isinstance(reason, str):
                (path / MANIFEST).unlink()
                write_manifest(path / MANIFEST, {"format": 2, "progress": {}, "metrics": {}, "files": {}})
            else:

                def failing(folder: Path) -> Any:
                    if folder == path:
                        raise OSError(reason, os.strerror(reason))
                    return read_manifest(folder)

                for module in ("checkpoint", "checkpoint_folder"):
                    monkeypatch.setattr(f"hvdtrain.checkpoint.{module}.read_manifest", failing)

        checkpoints = synchronous(tmp_path, keep=1)
        whole = (save(tmp_path, 1) / MANIFEST).read_bytes()
        unreadable(1)
        for step in (2, 3, 4):
            checkpoints.save(state_of(step), progress=progress_at(step))
        monkeypatch.undo()
        (tmp_path / "epoch-0000-step-000001" / MANIFEST).write_bytes(whole)
        assert steps(tmp_path) == [1, 4] and step_of(restored(tmp_path, which=checkpoints.list()[0].path)) == 1
        whole = (tmp_path / "epoch-0000-step-000004" / MANIFEST).read_bytes()
        unreadable(4)
        assert step_of(restored(tmp_path)) == 1
        assert "skipping the unusable checkpoint" in capsys.readouterr().err
        checkpoints.save(state_of(2), progress=progress_at(2))  # the run that went on from 1
        monkeypatch.undo()
        (tmp_path / "epoch-0000-step-000004" / MANIFEST).write_bytes(whole)
        assert step_of(restored(tmp_path)) == 2, "saved last, though the other could not be looked at"

    @pytest.mark.parametrize("name", [MANIFEST, "a.bin"])
    def test_the_last_of_a_run_that_went_back_is_not_passed_over_in_silence(
        self, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for step in (1, 3, 2):
            newest = save(tmp_path, step)
        (newest / name).write_bytes(b"")
        assert step_of(restored(tmp_path)) == 3
        assert f"skipping the unusable checkpoint {newest}" in capsys.readouterr().err

    @pytest.mark.parametrize("text", ["[]", "3", '"x"', "null", "{}", '{"digest": 1}', "\xff", "[" * 100_000])
    def test_a_manifest_that_is_something_else(self, tmp_path: Path, text: str) -> None:
        save(tmp_path, 1)
        (save(tmp_path, 2) / MANIFEST).write_text(text, encoding="latin-1")
        assert step_of(restored(tmp_path)) == 1

    def test_all_damaged_is_an_error_not_a_new_start(self, tmp_path: Path) -> None:
        for step in (1, 2):
            (save(tmp_path, step) / "b.bin").write_bytes(b"")
        with pytest.raises(CheckpointError, match="a checkpoint that is complete and readable") as caught:
            restored(tmp_path)
        assert "b.bin has 0 bytes instead of 100" in caught.value.received
        with pytest.raises(CheckpointError, match="a checkpoint that is complete and readable"):
            restored(tmp_path, which="best")

    def test_best_damaged_falls_back_to_the_next_best(self, tmp_path: Path) -> None:
        for step, loss in ((1, 0.3), (2, 0.1), (3, 0.2)):
            path = save(tmp_path, step, loss)
            if step == 2:
                data = (path / "a.bin").read_bytes()
        (tmp_path / "epoch-0000-step-000002" / "a.bin").write_bytes(data[::-1])  # same size: only the checksum knows
        assert synchronous(tmp_path).best().progress.step == 2  # type: ignore[union-attr]
        assert step_of(restored(tmp_path, which="best")) == 3
