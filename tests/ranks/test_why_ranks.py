"""What real ranks leave in the run's directory tells why the job ended; a run that ends well leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Result, run_ranks

from hvdtrain.comm.ring import FOLDER
from hvdtrain.commands.why import why
from hvdtrain.core import variables

PROGRAM = """
import os, sys, torch, hvdtrain
import hvdtrain.torch as hvt

def fault(rank):
    if rank == 1 and way == "raises":
        raise RuntimeError("boom")  # here
    if rank == 1 and way == "exits":
        sys.exit(0)
    if rank == 1 and way == "without a word":
        os._exit(3)

way, folder = sys.argv[1:]
with hvdtrain.init("torch", device="cpu") as world:
    model = torch.nn.Linear(3, 2)
    model, optimizer = hvt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), verify=False)
    with hvdtrain.RunLog(folder, world, config={}, resume=True, progress=False, tensorboard=False):
        for step in range(5):
            if step == 3:
                fault(world.rank)
            optimizer.backward(model(torch.ones(4, 3)).square().mean())
            optimizer.step()
"""


def start(way: str, run: Path, launcher: str = "forked", np: int = 2, in_step_s: str = "3") -> Result:
    script = run.with_suffix(".py")
    script.write_text(PROGRAM)
    return run_ranks(
        [script, way, str(run)], np, launcher=launcher, env={variables.IN_STEP_S: in_step_s}, timeout_s=120
    )


def check_named(run: Path, launcher: str, in_step_s: str = "3") -> None:
    done = start("raises", run, launcher, in_step_s=in_step_s)
    assert done.returncode != 0 and "RuntimeError: boom" in done.ranks_error[1], done.text
    first, at, *_ = [line for line in why(run).splitlines() if not line.startswith(str(run))]
    assert first.startswith("  received: rank 1 (host ") and first.endswith(": RuntimeError: boom"), why(run)
    assert at.strip().startswith(f"at {run.stem}.py:") and at.endswith("# here"), why(run)


@pytest.mark.parametrize(
    "launcher",
    ["forked horovodrun", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("mpirun", "torchrun"))],
)
def test_an_error_of_rank_1_is_told_and_gone_when_the_run_has_ended_well(launcher: str, tmp_path: Path) -> None:
    check_named(tmp_path / "run", launcher)
    start("well", tmp_path / "run", np=1).check()
    assert not (tmp_path / "run" / FOLDER).exists() and not why(tmp_path / "run")


def test_an_error_is_told_where_ranks_keep_no_pages(tmp_path: Path) -> None:
    check_named(tmp_path / "run", "forked", in_step_s="0")
    start("well", tmp_path / "run", in_step_s="0").check()
    assert not (tmp_path / "run" / FOLDER).exists()


@pytest.mark.thorough
def test_ranks_out_of_step_are_told_again(tmp_path: Path) -> None:
    done = start("exits", tmp_path / "run")
    said = why(tmp_path / "run")
    assert "rank 1: at the end of run.py, after 3 update(s)" in said and "rank 0: in update 4" in said, done.text
    start("well", tmp_path / "run").check()
    assert not why(tmp_path / "run"), "it is past"


@pytest.mark.thorough
def test_a_rank_that_ends_without_a_word(tmp_path: Path) -> None:
    done = start("without a word", tmp_path / "run")
    said = why(tmp_path / "run")
    assert "or by os._exit" in said and "rank 1 (host " in said and "3 update(s) done" in said, f"{said}\n{done.text}"
