"""Loops on Lightning Fabric as users write them, on ranks: exact, or refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import PROGRAMS, Result, run_ranks
from limits import Limit, note_all

PROGRAM = PROGRAMS / "lightning" / "fabric_loops.py"
CASES = re.findall(r"^def (case_\w+)", PROGRAM.read_text(encoding="utf-8"), re.MULTILINE)
ROWS = {  # row: what was tried, and how it ends: near is 2e-3, of rounded numbers
    "F1": ("a plain loop with an uneven tail, and the loss over all ranks", "exact"),
    "F2": ("an evaluation of uneven data: sums, means, counts and a metric of torchmetrics", "exact"),
    "F2b": ("all_reduce within an evaluation whose last step has fewer samples than ranks", "refused"),
    "F3a": ("accumulation within no_backward_sync, with a tail", "exact"),
    "F3b": ("accumulation of a token loss with weight=", "exact"),
    "F4": ("an update with gradients that wait since no_backward_sync", "refused"),
    "F5a": ("clipping by norm", "exact"),
    "F5b": ("clipping by value", "exact"),
    "F6": ("a GAN: two models with their optimizers", "exact"),
    "F7a": ("resuming after an epoch", "exact"),
    "F7b": ("resuming within a shuffled epoch", "exact"),
    "F8": ("LBFGS with a line search", "exact"),
    "F9a": ('precision="64-true"', "exact"),
    "F9b": ('precision="bf16-mixed"', "near"),
    "F9c": ("float16 with a gradient scaler", "near"),
    "F10": ("a loss on gathered outputs, with their gradient", "exact"),
    "F10b": ("a loss on hvt.whole", "refused"),
    "F11a": ("an IterableDataset", "refused"),
    "F11b": ("a batch_sampler of the user's own", "refused"),
    "F11c": ("a DistributedSampler of the user's own", "refused"),
    "F11d": ("backward() without a loader", "refused"),
    "F11e": ("training in eval mode", "refused"),
    "F11f": ("two loaders in one loop, with different tails", "refused"),
    "F11g": ("an optimizer of parameters that were not set up", "refused"),
    "F11h": ("nn.SyncBatchNorm", "refused"),
    "F11i": ("weights changed on one rank", "refused"),
}


@pytest.fixture(scope="module")
def result() -> Result:
    return run_ranks([PROGRAM], 2, timeout_s=300)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_loop_is_exact_or_refused(case: str, result: Result) -> None:
    assert f"passed {case}" in result.out, result.text


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(("engine", "np"), [("horovod", 3), ("ddp", 2), ("auto", 1)])
def test_other_ranks_and_engines(engine: str, np: int) -> None:
    launcher = "forked torchrun" if engine == "ddp" else "forked"
    cases = CASES if np > 1 else [case for case in CASES if "refused" not in case and "evaluation" not in case]
    done = run_ranks([PROGRAM, engine, *cases], np, launcher=launcher, timeout_s=400).check()
    assert all(f"passed {case}" in done.out for case in cases)


@pytest.mark.slow
def test_how_far_each_row_is_from_one_process(result: Result, limit: Limit) -> None:
    note_all(limit, ROWS, result.check().ranks_output[0].splitlines(), near=2e-3)
    assert "prepare() was not called" not in result.text


@pytest.mark.slow
def test_a_loop_saves_and_ends_on_sigterm(tmp_path: Path) -> None:
    done = run_ranks([PROGRAM.with_name("fabric_stopped.py"), str(tmp_path / "saved.ckpt")], 2, timeout_s=120)
    assert (tmp_path / "saved.ckpt").is_file(), done.text
    assert "preempted: the loop could save" in done.out and "exit code 85" in done.text, done.text
    assert "the loop ended" not in done.out
