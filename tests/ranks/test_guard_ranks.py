"""`hvdtrain guard` says nothing of twenty clean scripts, and names each of their mutants with its line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tomllib
from harness import PROGRAMS, Result, run_ranks
from horovod_scripts import FOLDER, KERAS, TORCH
from limits import Limit

CHANGES = tomllib.loads((FOLDER / "mutants.toml").read_text())
MUTANTS = CHANGES["mutant"]
WAIT = ("empty_shard", "objects_of_two_types")
QUIET = [mutant for mutant in MUTANTS if mutant["kind"] != "hangs"]
GUARD = ("-m", "hvdtrain", "guard")
ENV = {"KERAS_BACKEND": "tensorflow"}


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


def guarded(folder: Path, lines: Sequence[str], *flags: str) -> tuple[Result, list[dict[str, Any]]]:
    """Runs scripts in turn under the guard; returns what came, and the findings of its report."""
    report = folder / "report.json"
    program: list[str | Path] = [
        *GUARD,
        *flags,
        "--report",
        report,
        PROGRAMS / "horovod" / "in_turn.py",
        folder,
        *lines,
    ]
    result = run_ranks(program, 2, launcher="horovodrun", env=ENV, timeout_s=120).check()
    return result, json.loads(report.read_text())["findings"]


@pytest.mark.parametrize(
    "lines",
    [pytest.param(TORCH, id="torch"), pytest.param(KERAS, id="keras", marks=pytest.mark.thorough)],
)
def test_clean_scripts(lines: tuple[str, ...], tmp_path: Path) -> None:
    variants = [str(mutated(clean, tmp_path)) for clean in CHANGES["clean"]] if lines is TORCH else []
    result, findings = guarded(tmp_path, [*lines, *variants], "--every", "3")
    assert not findings and "global hooks" not in result.err, result.err
    [said] = [line for line in result.ranks_error[0].splitlines() if "hvdtrain guard" in line]
    assert "averaged, and the replicas equal" in said and "hvdtrain guard" not in result.ranks_error.get(1, "")


@pytest.mark.parametrize("framework", ["torch", pytest.param("keras", marks=pytest.mark.thorough)])
def test_mutants_are_named(framework: str, tmp_path: Path) -> None:
    chosen = [mutant for mutant in QUIET if mutant["script"].startswith("torch") == (framework == "torch")]
    paths = {mutant["name"]: mutated(mutant, tmp_path) for mutant in chosen}
    lines = [f"{paths[mutant['name']]} {its}" for mutant in chosen for its in mutant.get("runs", [""])]
    result, findings = guarded(tmp_path, lines, "--warn")
    found = sorted((finding["kind"], finding["line"].partition(": ")[0] + ": ") for finding in findings)
    wanted = sorted(
        (kind, place(paths[mutant["name"]], piece))
        for mutant in chosen
        for kind, piece in [(mutant["kind"], mutant["line"]), *mutant.get("also", ())]
    )
    assert found == wanted, result.text
    for finding in findings:
        assert finding["remedy"] and len(re.findall(rf"guard: {re.escape(finding['line'])}\n", result.err)) == 1, (
            finding
        )


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
    result = run_ranks([*GUARD, path], 2, launcher="horovodrun", timeout_s=60)
    assert "code: 76" in result.err and place(path, mutant["line"]) in result.ranks_error[0], result.text
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
    result = run_ranks([*GUARD, path], 2, launcher="horovodrun", env={"KERAS_BACKEND": "torch"}, timeout_s=90).check()
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
