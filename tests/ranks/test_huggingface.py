"""Hugging Face trainings as users write them, on ranks: exact, or refused by name."""

from __future__ import annotations

import re

import pytest
from harness import PROGRAMS, Result, chosen_cases, run_ranks
from limits import Limit, note_all

PROGRAM = PROGRAMS / "huggingface" / "as_written.py"
CASES = re.findall(r"^def (case_\w+)", PROGRAM.read_text(encoding="utf-8"), re.MULTILINE)
ROWS = {  # row: what was tried, and how it ends: near is 1e-5, where transformers adds up in float32
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
}


@pytest.fixture(scope="module")
def result(request: pytest.FixtureRequest) -> Result:
    return run_ranks([PROGRAM, "auto", *chosen_cases(request)], 2, timeout_s=400)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_training_is_exact_or_refused(case: str, result: Result) -> None:
    assert f"passed {case}" in result.out, result.text


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("engine", "np", "launcher"),
    [("horovod", 3, "forked"), ("ddp", 2, "forked torchrun"), ("auto", 2, "mpirun"), ("auto", 1, "none")],
)
def test_other_ranks_engines_and_launchers(engine: str, np: int, launcher: str) -> None:
    cases = [case for case in CASES if np > 1 or "refused" not in case]
    done = run_ranks([PROGRAM, engine, *cases], np, launcher=launcher, timeout_s=500).check()
    assert all(f"passed {case}" in done.out for case in cases)


@pytest.mark.slow
def test_how_far_each_row_is_from_one_process(result: Result, limit: Limit) -> None:
    note_all(limit, ROWS, result.check().ranks_output[0].splitlines(), near=1e-5)
    assert "hvdtrain: the loss is not checked on parts" in result.out, "H2c has batches of one sample"
