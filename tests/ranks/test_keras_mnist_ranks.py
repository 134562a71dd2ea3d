"""The Keras MNIST program, really run: every launch form, both backends, resume, and what plain Keras makes of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import built_in
import numpy as np
import pytest
from harness import Result, run_ranks
from limits import Limit

from hvdtrain.datasets import digits


@pytest.fixture(scope="module")
def few_pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_in.few_digits(tmp_path_factory.mktemp("data"))


def run_program(launcher: str, ranks: int, *flags: object, **options: Any) -> Result:
    arguments = ["-m", "hvdtrain.keras_mnist", *map(str, flags)]
    return run_ranks(arguments, ranks, launcher=launcher, timeout_s=240, **options)


# ---- real runs


def check_run(result: Result, run_dir: Path, ranks: int) -> dict[str, Any]:
    ended = built_in.check_run(result, run_dir, ranks, "test accuracy")
    assert ranks == 1 or re.search(rf"averaging proven: {ranks} ranks, 8 parameters", result.ranks_output[0])
    assert "oneDNN" not in result.err and "absl" not in result.err
    return ended


@pytest.mark.slow
def test_two_ranks_reach_the_accuracy_and_plain_keras_agrees(tmp_path: Path, limit: Limit) -> None:
    flags = ["--epochs", 2, "--run-dir", tmp_path / "run", "--data", "digits"]
    result = run_program("horovodrun", 2, *flags)  # the command that users type
    ended = check_run(result, tmp_path / "run", 2)
    assert ended["top1"] >= 0.9 and {"loss", "top1", "weights_sha256"} <= ended.keys()
    limit(
        "K19a", "run.json says test_accuracy (Keras) and top1 (PyTorch) for one thing", mended="loss and top1 in both"
    )
    assert "epochs: 2 over 2 ranks: 1 each" in result.ranks_output[0]
    saved = re.search(r"load_model\('(.+)'\)", result.ranks_output[0])
    assert saved is not None
    check_in_plain_keras(Path(saved[1]), tmp_path, ended)


def check_in_plain_keras(saved: Path, tmp_path: Path, ended: dict[str, Any]) -> None:
    """The checkpoint loads without Horovod and hvdtrain, and gives the same numbers."""
    _, _, x_test, y_test = digits.load()
    np.savez(tmp_path / "test.npz", x=x_test[..., None], y=y_test)
    script = tmp_path / "plain.py"
    script.write_text(
        "import sys, json\n"
        "sys.modules.update(dict.fromkeys(['horovod', 'hvdtrain']))  # importing them fails\n"
        "import numpy, keras\n"
        "test = numpy.load(sys.argv[2])\n"
        "model = keras.saving.load_model(sys.argv[1])\n"
        "print(json.dumps(model.evaluate(test['x'], test['y'], verbose=0, return_dict=True)))\n"
    )
    plain = run_ranks([script, saved, tmp_path / "test.npz"], 1, env={"KERAS_BACKEND": "tensorflow"}).check()
    numbers = json.loads(plain.out.splitlines()[-1])
    assert numbers["accuracy"] == pytest.approx(ended["top1"], abs=1e-6)
    assert numbers["loss"] == pytest.approx(ended["loss"], rel=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("launcher", "ranks", "flags"),
    [
        ("none", 1, ("--backend", "torch")),
        ("mpirun", 2, ("--compression", "fp16", "--lr-scale", "linear", "--no-epochs-divided")),
        ("horovodrun", 4, ("--no-epochs-divided", "--watch-every", "3")),
        ("horovodrun", 2, ("--backend", "torch")),
    ],
)
def test_launch_forms(launcher: str, ranks: int, flags: tuple[str, ...], few_pictures: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = run_program(
        launcher, ranks, "--data", few_pictures, "--run-dir", run_dir, "--epochs", 1,
        "--per-rank-batch", 32 // ranks, *flags,
    )  # fmt: skip
    ended = check_run(result, run_dir, ranks)
    assert 0.2 < ended["top1"] <= 1.0
    run = built_in.record(run_dir)
    assert run["effective_batch"] == 32
    assert run["config"]["backend"] == ("torch" if "torch" in flags else "tensorflow")


@pytest.mark.thorough
@pytest.mark.slow
def test_resume_goes_on_bit_exactly(few_pictures: Path, tmp_path: Path) -> None:
    flags = ["--data", few_pictures, "--seed", "3", "--per-rank-batch", "32"]
    env = {"KERAS_BACKEND": "tensorflow"}  # else it is known only when the program has read its flags
    straight = run_program("forked", 2, *flags, "--epochs", 4, "--run-dir", tmp_path / "straight", env=env)
    first = run_program("forked", 2, *flags, "--epochs", 2, "--run-dir", tmp_path / "parts", env=env)
    wanted = check_run(straight, tmp_path / "straight", 2)["weights_sha256"]
    early = check_run(first, tmp_path / "parts", 2)["weights_sha256"]
    rest = run_program("forked", 2, *flags, "--epochs", 4, "--run-dir", tmp_path / "parts", "--resume", env=env)
    assert "resuming after epoch 2 of 4" in rest.text
    assert check_run(rest, tmp_path / "parts", 2)["weights_sha256"] == wanted != early
