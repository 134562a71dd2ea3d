"""`hvdtrain guard` says nothing of twenty clean scripts, and names each of their mutants with its line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tomllib
from harness import PROGRAMS, run_ranks
from horovod_scripts import FOLDER, KERAS, TORCH
from limits import Limit

CHANGES = tomllib.loads((FOLDER / "mutants.toml").read_text())
MUTANTS = CHANGES["mutant"]
WAIT = ("empty_shard", "objects_of_two_types")
QUIET = [mutant for mutant in MUTANTS if mutant["kind"] != "hangs"]
GUARD = ("-m", "hvdtrain", "guard")


def mutated(mutant: dict[str, Any], folder: Path) -> Path:
    text = (FOLDER / mutant["script"]).read_text()
    for old, new in mutant["change"]:
        assert text.count(old) == 1, (mutant["name"], old)
        text = text.replace(old, new)
    path = folder / f"{mutant['name']}.py"
    path.write_text(text)
    return path


def place(path: Path, piece: str) -> str:
    """The line that an error must name."""
    [number] = [number for number, line in enumerate(path.read_text().splitlines(), 1) if piece in line]
    return f"{path.name}:{number}: "


@pytest.mark.parametrize(
    ("framework", "parts"),
    [
        ("torch", "clean and mutants"),
        pytest.param("keras", "clean", marks=pytest.mark.thorough),
        pytest.param("keras", "mutants", marks=pytest.mark.thorough),
    ],
)
def test_clean_scripts_and_mutants(framework: str, parts: str, tmp_path: Path) -> None:
    """Clean scripts have no findings, mutants those of their lines."""
    torch = framework == "torch"
    chosen = [mutant for mutant in QUIET if mutant["script"].startswith("torch") == torch and "mutants" in parts]
    paths = {mutant["name"]: mutated(mutant, tmp_path) for mutant in chosen}
    lines = [*(TORCH if torch else KERAS)] if "clean" in parts else []
    lines += [str(mutated(clean, tmp_path)) for clean in CHANGES["clean"] if torch]
    lines += [f"{paths[mutant['name']]} {its}" for mutant in chosen for its in mutant.get("runs", [""])]
    report, program = tmp_path / "report.json", PROGRAMS / "horovod" / "in_turn.py"
    result = run_ranks(
        [*GUARD, "--warn", "--every", "3", "--report", report, program, tmp_path, *lines], 2, launcher="horovodrun",
        env={} if torch else {"KERAS_BACKEND": "tensorflow"}, timeout_s=150,
    ).check()  # fmt: skip
    findings = json.loads(report.read_text())["findings"]
    found = sorted((finding["kind"], finding["line"].partition(": ")[0] + ": ") for finding in findings)
    wanted = sorted(
        (kind, place(paths[mutant["name"]], piece))
        for mutant in chosen
        for kind, piece in [(mutant["kind"], mutant["line"]), *mutant.get("also", ())]
    )
    assert found == wanted and "global hooks" not in result.err, result.text
    for finding in findings:
        assert finding["remedy"] and len(re.findall(rf"guard: {re.escape(finding['line'])}\n", result.err)) == 1, (
            finding
        )


def test_a_clean_script_prints_one_line(tmp_path: Path) -> None:
    result = run_ranks([*GUARD, FOLDER / "torch_mnist.py", "--epochs", "1"], 2, cwd=tmp_path).check()
    [line] = [line for line in result.ranks_error[0].splitlines() if "hvdtrain guard" in line]
    assert "averaged, and the replicas equal" in line and "hvdtrain guard" not in result.ranks_error.get(1, "")


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(one, id=one["name"], marks=[] if one["name"] in WAIT else [pytest.mark.thorough])
        for one in MUTANTS
        if one["kind"] == "hangs"
    ],
)
def test_ranks_that_wait_are_named(mutant: dict[str, Any], tmp_path: Path, limit: Limit) -> None:
    path = mutated(mutant, tmp_path)
    result = run_ranks([*GUARD, path], 2, timeout_s=60)
    assert re.search("code:? 76", result.text) and place(path, mutant["line"]) in result.ranks_error[0], result.text
    assert "ended with rank 0" in result.ranks_error[1] and result.seconds < 30
    if mutant["name"] == "empty_shard":
        said = result.ranks_error[0]
        attack = "`hvdtrain guard`: a rank without data parts in the first training step"
        limit("C16", attack, refused=said[said.index("every rank must come") :])


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["horovodrun", "mpirun"])
def test_a_finding_ends_all_ranks(launcher: str, tmp_path: Path) -> None:
    path = mutated(MUTANTS[0], tmp_path)
    result = run_ranks([*GUARD, path, "--epochs", "1"], 2, launcher=launcher, timeout_s=60)
    assert result.returncode != 0 and "77" in result.err, result.text
    assert place(path, MUTANTS[0]["line"]) in result.ranks_error[0]
    assert "fix: optimizer = hvd.DistributedOptimizer" in result.ranks_error[0]
    assert "ended with rank 0" in result.ranks_error[1]


def test_keras_on_pytorch_trains_and_is_said_not_to_be_watched(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import keras, numpy as np, horovod.keras as hvd\nhvd.init()\n"
        "model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), 'mse')\n"
        "model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)\nprint('trained')\n"
    )
    result = run_ranks([*GUARD, path], 2, env={"KERAS_BACKEND": "torch"}, timeout_s=90).check()
    assert result.out.count("trained") == 2, result.text
    assert result.err.count("not watched: Keras on its PyTorch backend") == 1, result.text


def test_a_script_is_run_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(
        "import sys\nX = 3\nif __name__ == '__main__':\n    print(__name__, sys.argv[1:])\n"
    )
    path = tmp_path / "train.py"
    path.write_text("import sys, beside\nprint(__name__, sys.argv[1:], beside.X)\nsys.exit(int(sys.argv[1]))\n")
    for code in (0, 5):
        result = run_ranks([*GUARD, path, str(code)], 1, launcher="none")
        assert result.returncode == code and result.out == f"__main__ ['{code}'] 3\n", result.text
    for report, code, said in (
        (tmp_path, 2, f"--report names a file that can be written\n  received: {tmp_path}: Is a directory"),
        (tmp_path / "no" / "report.json", 2, "No such file or directory"),
        (tmp_path / "report.json", 0, f"nothing was watched: {tmp_path / 'report.json'} is not written"),
    ):
        result = run_ranks([*GUARD, "--report", report, path, "0"], 1, launcher="none")
        assert result.returncode == code and said in result.err and "Traceback" not in result.err, result.text
        assert ("__main__" in result.out) == (code == 0), result.text
    path.write_text("def f():\n    raise KeyError('x')\nf()\n")
    result = run_ranks([*GUARD, path], 1, launcher="none")
    assert result.returncode == 1 and "hvdtrain" not in result.err and "KeyError" in result.err, result.text
    path.write_text("x = (\n")
    result = run_ranks([*GUARD, path], 1, launcher="none")
    assert result.returncode == 1 and result.err.count("Error") == 1 and "SyntaxError" in result.err, result.text
    assert "Traceback" not in result.err and "runpy" not in result.err, result.text
    result = run_ranks([*GUARD, "-m", "beside", "x"], 1, launcher="none", cwd=tmp_path)
    assert result.returncode == 0 and result.out == "__main__ ['x']\n", result.text
    assert run_ranks([*GUARD, tmp_path / "none.py"], 1, launcher="none").returncode == 2
