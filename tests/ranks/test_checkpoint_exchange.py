"""Checkpoints to and from plain PyTorch files: bit for bit, and through DCP with plain scripts of two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch_cases
from harness import Result, run_ranks

PLAIN = torch_cases.FOLDER / "plain_dcp.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("exchange")
    for engine in ("ddp", "fsdp"):
        (made / engine).mkdir()
        run_ranks([PLAIN, "save", engine, made / engine], 2, launcher="forked torchrun").check()
    return made


@pytest.fixture(scope="module")
def result(folder: Path) -> Result:
    return run_ranks([torch_cases.FOLDER / "exchange.py", folder], 1, timeout_s=180)


@pytest.mark.parametrize("case", torch_cases.names("exchange.py"))
def test_exchange(case: str, result: Result) -> None:
    assert case in torch_cases.passed(result.out), result.text


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=pytest.mark.thorough)])
def test_a_plain_script_loads_what_was_exported(engine: str, folder: Path, result: Result) -> None:
    """Into shards, or whole: weights and the optimizer's state are those that the other script had."""
    run_ranks([PLAIN, "load", engine, folder / "out"], 2, launcher="forked torchrun").check()
    saved = torch.load(folder / "fsdp" / "whole.pt", weights_only=True)
    loaded = torch.load(folder / "out" / "loaded.pt", weights_only=True)
    assert saved[1]["param_groups"] == loaded[1]["param_groups"] and saved[0].keys() == loaded[0].keys()
    assert all(torch.equal(value, loaded[0][name]) for name, value in saved[0].items())
    for name, state in saved[1]["state"].items():
        assert all(torch.equal(value, loaded[1]["state"][name][key]) for key, value in state.items()), name
