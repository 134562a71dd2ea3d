"""Trainings by Lightning, Fabric and Hugging Face as users write them, on ranks: exact, or refused by name."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import PROGRAMS, Result, chosen_cases, run_ranks
from limits import Limit, note_all

LIBRARIES = {
    "lightning": PROGRAMS / "lightning" / "as_written.py",
    "fabric": PROGRAMS / "lightning" / "fabric_loops.py",
    "huggingface": PROGRAMS / "huggingface" / "as_written.py",
}
CASES = {
    library: re.findall(r"^def (case_\w+)", program.read_text(encoding="utf-8"), re.MULTILINE)
    for library, program in LIBRARIES.items()
}
NEAR = {"lightning": 1e-3, "fabric": 2e-3, "huggingface": 1e-5}  # where numbers are rounded
# row: what was tried, and how it ends
ROWS = {
    "lightning": {
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
    },
    "fabric": {
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
    },
    "huggingface": {
        "H1a": ("BERT's classification of uneven data, with an evaluation and metrics", "exact"),
        "H1b": ("the same with accumulation and AdamW", "exact"),
        "H2a": ("GPT-2's token loss, accumulated and clipped, with a short tail", "exact"),
        "H2c": ("a token loss with one sample on each rank", "exact"),
        "H3a": ("BERT's masked language model, whose loss ignores num_items_in_batch", "exact"),
        "H4a": ("compute_loss overridden: a mean over samples", "exact"),
        "H4b": ("compute_loss overridden: a mean over tokens", "exact"),
        "H4c": ("compute_loss_func: a sum over num_items_in_batch", "exact"),
        "H4f": ("label_smoothing_factor", "near"),
        "H4g": ("a mean over samples, which only a later batch tells from one over labels", "exact"),
        "H4i": ("a mean over labels, which only a later batch tells from one over samples", "exact"),
        "H4h": ("a token mean of a module that does not take num_items_in_batch", "exact"),
        "H5a": ("ViT with workers and dropped tails", "exact"),
        "H6": ("frozen and unused parameters of a user's own module, accumulated, evaluation by steps", "exact"),
        "H7a": ("early stopping, the best checkpoint at the end, and ReduceLROnPlateau", "exact"),
        "H8": ("resuming after and within an epoch, on ranks and in one process", "exact"),
        "H9": ("predictions, labels, inputs and losses, in the order of the data", "exact"),
        "H10": ("a loader of the user's own, dealt", "exact"),
        "H11": ("T5 with Seq2SeqTrainer and generated predictions", "exact"),
        "H12": ("a contrastive loss", "refused"),
        "H13a": ("training on an IterableDataset", "refused"),
        "H13b": ("a loader of the user's own, not dealt", "refused"),
        "H14a": ("weights changed on one rank", "refused"),
        "H14b": ("a training_step of the user's own, not averaged", "refused"),
        "H14c": ("an order of the data that differs between ranks", "refused"),
        "H15a": ("the TrainingArguments of transformers", "refused"),
        "H15b": ("options that cannot be right", "refused"),
        "H16": ("a checkpoint that a rank does not see", "refused"),
    },
}


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> Callable[[str], Result]:
    """Runs the chosen cases of a library, once."""
    chosen = chosen_cases(request)

    @functools.cache
    def run(library: str) -> Result:
        cases = [case for case in CASES[library] if case in chosen]
        return run_ranks([LIBRARIES[library], "auto", *cases], 2, timeout_s=400)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("library", "case"), [(library, case) for library in CASES for case in CASES[library]])
def test_a_training_is_exact_or_refused(library: str, case: str, ran: Callable[[str], Result]) -> None:
    assert f"passed {case}" in ran(library).out, ran(library).text


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("library", "engine", "np", "launcher"),
    [
        *((library, "horovod", 3, "forked") for library in LIBRARIES),
        *((library, "ddp", 2, "forked torchrun") for library in LIBRARIES),
        ("fabric", "auto", 1, "none"),
        ("huggingface", "auto", 1, "none"),
        ("huggingface", "auto", 2, "mpirun"),
    ],
)
def test_other_ranks_engines_and_launchers(library: str, engine: str, np: int, launcher: str) -> None:
    cases = [case for case in CASES[library] if np > 1 or not re.search("refused|evaluation", case)]
    done = run_ranks([LIBRARIES[library], engine, *cases], np, launcher=launcher, timeout_s=500).check()
    assert all(f"passed {case}" in done.out for case in cases)


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_how_far_each_row_is_from_one_process(library: str, ran: Callable[[str], Result], limit: Limit) -> None:
    result = ran(library).check()
    note_all(limit, ROWS[library], result.ranks_output[0].splitlines(), near=NEAR[library])
    # the plain references of the others train as loops that nothing prepared
    assert library != "fabric" or "hvdtrain averages nothing" not in result.text
    unchecked = "hvdtrain: the loss is not checked on parts" in result.out
    assert unchecked == (library == "huggingface"), "H2c has batches of one sample"


@pytest.mark.slow
@pytest.mark.thorough
def test_an_error_on_one_rank_ends_all_ranks() -> None:
    done = run_ranks([PROGRAMS / "lightning" / "breaks.py"], 2, timeout_s=120)
    assert done.returncode != 0 and "ValueError: this rank breaks" in done.text, done.text
    assert "averaging proven: 2 ranks" in done.out, "the ranks have joined before"


@pytest.mark.slow
def test_a_loop_saves_and_ends_on_sigterm(tmp_path: Path) -> None:
    done = run_ranks([PROGRAMS / "lightning" / "fabric_stopped.py", str(tmp_path / "saved.ckpt")], 2, timeout_s=120)
    assert (tmp_path / "saved.ckpt").is_file(), done.text
    assert "preempted: the loop could save" in done.out and "exit code 85" in done.text, done.text
    assert "the loop ended" not in done.out
