"""Checkpoints: bit-exact at the same size, every sample once at another, and the same files on every engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch_cases
from harness import Result, run_ranks

PROGRAM = torch_cases.FOLDER / "checkpoints.py"
# the first writes the checkpoint that all go on from
JOBS = {
    "horovod": ("horovodrun", 2, {}),
    "ddp": ("torchrun", 2, {}),
    "solo": ("none", 1, {}),
    "deepspeed": ("torchrun", 2, {"DS_ACCELERATOR": "cpu"}),
}

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    return {
        engine: run_ranks([PROGRAM, engine, folder], ranks, launcher=launcher, env=env, timeout_s=180)
        for engine, (launcher, ranks, env) in JOBS.items()
    }


@pytest.mark.parametrize("case", torch_cases.names("checkpoints.py"))
@pytest.mark.parametrize("engine", JOBS)
def test_checkpoint(case: str, engine: str, results: dict[str, Result]) -> None:
    assert case in torch_cases.passed(results[engine].out), results[engine].text


@pytest.mark.parametrize("engine", JOBS)
def test_program_ends_well(engine: str, results: dict[str, Result]) -> None:
    results[engine].check()
