"""Horovod's own tests on the recipe's wheel: HVDTRAIN_HOROVOD_SOURCE names its repository, a checkout of v0.28.1 or a
git directory that has this tag. `tests/horovod_suites.toml` says what must become of each file, and which lines of the
tests are replaced, since Keras, TensorFlow or NumPy no longer have what stands there."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomllib
from harness import PROGRAMS, REPOSITORY, run_ranks
from horovods_repository import taken

pytestmark = pytest.mark.thorough

TABLE = tomllib.loads((REPOSITORY / "tests" / "horovod_suites.toml").read_text(encoding="utf-8"))
LAUNCHERS = {"gloo": "horovodrun", "mpi": "horovodrun --mpi"}  # of tests that ask to be run in ranks
LEGACY = {"TF_USE_LEGACY_KERAS": "1"}


@pytest.fixture(scope="module")
def suites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests as they are."""
    folder = taken("test", tmp_path_factory)
    missing = [name for name in ("mock", "parameterized") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"Horovod's tests need these: pip install {' '.join(missing)}")
    return folder


def replaced(suites: Path, folder: Path, suite: dict[str, Any]) -> Path:
    """The file, in a copy of the tests, with the lines of the table; each must be there as often as it says."""
    shutil.copytree(suites / "test", folder / "test")
    for name in [suite["file"], *suite.get("programs", [])]:
        text = (folder / name).read_text(encoding="utf-8")
        for line in TABLE["line"] if not suite.get("unmodified") else ():
            if line["file"] == name:
                assert text.count(line["old"]) == line["times"], line
                text = text.replace(line["old"], line["new"])
        (folder / name).write_text(text, encoding="utf-8")
    return folder / suite["file"]


@pytest.mark.parametrize(
    ("suite", "controller"),
    [
        pytest.param(suite, controller, id=f"{suite['name']}, {controller}")
        for suite in TABLE["suite"]
        for controller in suite.get("controllers", LAUNCHERS)
    ],
)
def test_suite(suite: dict[str, Any], controller: str, suites: Path, tmp_path: Path) -> None:
    legacy = suite.get("legacy", False)
    if legacy and importlib.util.find_spec("tf_keras") is None:
        pytest.skip("legacy Keras is not here: pip install --no-deps tf-keras==2.21.0")
    file = replaced(suites, tmp_path, suite)
    environment = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2", **(LEGACY if legacy else {})}
    if controller not in LAUNCHERS:  # new ranks may start slowly: those that wait for them abort after 30 s
        environment |= {"HOROVOD_GLOO_TIMEOUT_SECONDS": "200"}
    program = [PROGRAMS / "horovod" / "suite.py", tmp_path, file, *suite.get("left_out", {})]
    ranks, launcher = (2, LAUNCHERS[controller]) if controller in LAUNCHERS else (1, "none")
    run_ranks(program, ranks, launcher=launcher, env=environment, timeout_s=580 if ranks == 2 else 1500).check()
    for rank in range(ranks):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        counts = {what: sum(outcome == what for outcome, _ in found.values()) for what in ("passed", "skipped")}
        failed = {name: reason for name, (outcome, reason) in found.items() if outcome == "failed"}
        print(f"{suite['name']}, {controller}, rank {rank}: {counts}, failed: {sorted(failed)}")
        expected = suite["failed"].get(controller, {})
        assert set(failed) == set(expected), "\n".join(f"{name}: {reason}" for name, reason in failed.items())
        skipped = {reason for outcome, reason in found.values() if outcome == "skipped"}
        unknown = [reason for reason in skipped if not any(known in reason for known in TABLE["skips"].values())]
        assert not unknown, unknown
        assert counts["passed"] >= suite["passed"]
