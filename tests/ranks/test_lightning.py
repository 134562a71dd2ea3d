"""LightningModules as users write them, on ranks: exact, or refused by name."""

from __future__ import annotations

import re

import pytest
from harness import PROGRAMS, Result, run_ranks
from limits import Limit, note_all

PROGRAM = PROGRAMS / "lightning" / "as_written.py"
CASES = re.findall(r"^def (case_\w+)", PROGRAM.read_text(encoding="utf-8"), re.MULTILINE)
ROWS = {  # row: what was tried, and how it ends: near is 1e-3, of rounded numbers
    "L1": ("training, validation and test of uneven data, with metrics of torchmetrics", "exact"),
    "L2": ("accumulate_grad_batches with a tail, against one process with the whole batch", "exact"),
    "L3a": ("clipping by norm, and a scheduler that steps with each update", "exact"),
    "L3b": ("clipping by value, and ReduceLROnPlateau on a validation loss", "exact"),
    "L4a": ("a token loss that returns its weight", "exact"),
    "L4b": ("a sum of two means, each with its divisor", "exact"),
    "L4c": ("a token loss without its weight", "refused"),
    "L5a": ("a contrastive loss on hvt.whole", "exact"),
    "L5b": ("a contrastive loss on self.all_gather(..., sync_grads=True)", "exact"),
    "L5c": ("a contrastive loss of each rank's own batch", "refused"),
    "L6": ("EarlyStopping and the best checkpoint of ModelCheckpoint", "exact"),
    "L7a": ("ckpt_path= of checkpoints after and within an epoch", "exact"),
    "L7b": ("the same with trainer.estimated_stepping_batches in configure_optimizers", "exact"),
    "L8": ("predictions of uneven data, in order", "exact"),
    "L9": ("a sampler of the user's own", "exact"),
    "L10": ("limit_train_batches and limit_val_batches", "exact"),
    "L10b": ("limit_train_batches that cuts an accumulated update", "refused"),
    "L11": ("sync_batchnorm=True", "exact"),
    "L12": ("loaders made again for each epoch", "exact"),
    "L13": ("a GAN with manual optimization, clipping, toggled optimizers and their schedulers", "exact"),
    "L14": ("manual optimization of a loss on gathered outputs", "exact"),
    "L14b": ("manual optimization of a loss on hvt.whole", "refused"),
    "L15a": ("LightningModule.backward overridden", "refused"),
    "L15b": ("training on an IterableDataset", "refused"),
    "L15c": ("training on batches that no DataLoader deals", "refused"),
    "L15d": ("training on several loaders", "refused"),
    "L15e": ("GradientAccumulationScheduler", "refused"),
    "L15f": ("weights changed on one rank", "refused"),
    "L15g": ("fewer samples to validate than ranks", "refused"),
    "L15h": ("a rank's own value logged at the end of a validation", "refused"),
    "L15i": ("a DistributedSampler of the user's own", "refused"),
    "L15j": ("nn.SyncBatchNorm with manual optimization", "refused"),
    "L16a": ("a step that calls a part of the module, on a changed batch", "exact"),
    "L16b": ("LBFGS", "exact"),
    "L16c": ('precision="64-true"', "exact"),
    "L17": ("workers, a collate function, drop_last=True", "exact"),
    "L18a": ('precision="bf16-mixed"', "near"),
    "L18b": ('precision="16-mixed" with its gradient scaler', "near"),
    "L19a": ("fast_dev_run=True", "exact"),
    "L19b": ("overfit_batches=2", "exact"),
    "L19c": ("max_steps within an epoch", "exact"),
    "L19d": ("val_check_interval within an epoch", "exact"),
    "L20": ("a LightningDataModule", "exact"),
    "L21a": ("limit_train_batches=0.5 with gradient_clip_val", "exact"),
}


@pytest.fixture(scope="module")
def result() -> Result:
    return run_ranks([PROGRAM], 2, timeout_s=300)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_module_is_exact_or_refused(case: str, result: Result) -> None:
    assert f"passed {case}" in result.out, result.text


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(("engine", "np"), [("horovod", 3), ("ddp", 2)])
def test_other_ranks_and_engines(engine: str, np: int) -> None:
    launcher = "forked torchrun" if engine == "ddp" else "forked"
    done = run_ranks([PROGRAM, engine], np, launcher=launcher, timeout_s=400).check()
    assert all(f"passed {case}" in done.out for case in CASES)


@pytest.mark.slow
def test_how_far_each_row_is_from_one_process(result: Result, limit: Limit) -> None:
    note_all(limit, ROWS, result.check().ranks_output[0].splitlines(), near=1e-3)
    assert "prepare() was not called" not in result.text


@pytest.mark.slow
@pytest.mark.thorough
def test_an_error_on_one_rank_ends_all_ranks() -> None:
    done = run_ranks([PROGRAM.with_name("breaks.py")], 2, timeout_s=120)
    assert done.returncode != 0 and "ValueError: this rank breaks" in done.text, done.text
    assert "averaging proven: 2 ranks" in done.out, "the ranks have joined before"
