"""What the PyTorch programs refuse: one clear message, an exit code that is not 0, nobody left behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import harness
import pytest
from built_in import record
from harness import Result
from pictures import CORRUPT, write_folder
from test_torch_resnet_ranks import SIDE, run_program

SMALL = ["--model", "resnet18", "--image-size", SIDE, "--per-rank-batch", 4]


def refused(flags: list[object], ranks: int = 2, launcher: str = "forked") -> Result:
    """Runs the program, which must end with an error; returns what it said."""
    result = run_program(launcher, ranks, *flags)
    assert result.returncode not in (0, None), result.text
    return result


def told_once(result: Result, *parts: str) -> None:
    harness.told_once(result, "hvdtrain.torch_resnet", *parts)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--per-rank-batch", "0"], "--per-rank-batch must be a whole number >= 1, not '0'"),
        (["--label-smoothing", "-0.1"], "--label-smoothing must be a number >= 0"),
        (["--clip", "0"], "--clip must be a number > 0"),
        (["--engine", "mpi"], "--engine"),
        (["--resume", "--weights", "somewhere"], "--weights"),
        (["--data", "/no/such/folder"], "/no/such/folder"),
        (["--weights", "/no/such/checkpoint"], "/no/such/checkpoint: no such folder"),
    ],
)
def test_wrong_flag_value(flags: list[object], part: str) -> None:
    """Without a framework: this takes no second."""
    result = refused(flags, 1, "none")
    told_once(result, part)
    assert result.returncode == 2


def test_folder_without_classes(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    (tmp_path / "train" / "alone.jpg").touch()
    told_once(refused(["--data", tmp_path]), str(tmp_path / "train"))


# ---- what shows only while training


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of pictures, and a run on it."""
    folder = tmp_path_factory.mktemp("trained")
    write_folder(folder / "data")
    flags = [*SMALL, "--data", folder / "data", "--epochs", 1, "--run-dir", folder / "run"]
    run_program("forked", 1, *flags).check()
    return folder / "data", folder / "run"


def newest_checkpoint(run_dir: Path) -> Path:
    return sorted((run_dir / "checkpoints").iterdir())[-1]


@pytest.mark.slow
def test_a_broken_file_is_refused_when_strict(tmp_path: Path) -> None:
    write_folder(tmp_path / "data")
    flags = [*SMALL, "--data", tmp_path / "data", "--run-dir", tmp_path / "run", "--epochs", 1]
    result = refused([*flags, "--strict"])
    broken = str(tmp_path / "data" / "train" / "bee" / CORRUPT)
    named = [said for said in result.ranks_error.values() if broken in said]  # by the rank that came across it
    assert len(named) == 1 and "Traceback" not in named[0] and "fix: replace or remove" in named[0], result.text


@pytest.mark.slow
def test_nan_loss_stops_all_ranks_and_keeps_the_last_good_checkpoint(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    data, run = trained
    shutil.copytree(run, tmp_path / "run")
    good = newest_checkpoint(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in good.iterdir()}
    flags = ["--data", data, "--epochs", 3, "--lr", "1e30", "--run-dir", tmp_path / "run", "--resume"]
    result = refused([*SMALL, *flags, "--engine", "horovod"])
    said = "\n".join(result.ranks_error.values())
    for part in ("the loss is nan at step 7 (epoch 1)", "rank 0: nan", "rank 1: nan", "first bad layer: layer1"):
        assert part in said, result.text
    assert "Traceback" not in said, result.text
    assert newest_checkpoint(tmp_path / "run") == good
    assert {path.name: path.read_bytes() for path in good.iterdir()} == before
    ended = record(tmp_path / "run")
    assert ended["status"] == "failed" and "NonFiniteError" in ended["error"]
