"""Hugging Face trainings as users write them, on ranks: exact, or refused by name."""

from __future__ import annotations

import re

import pytest
from harness import PROGRAMS, Result, chosen_cases, run_ranks

PROGRAM = PROGRAMS / "huggingface" / "as_written.py"
CASES = re.findall(r"^def (case_\w+)", PROGRAM.read_text(encoding="utf-8"), re.MULTILINE)
ROWS = {  # row: what was tried, and how it ends: near is 1e-5, where transformers adds up in float32
    "H1a": ("BERT's classification of uneven data, with an evaluation and metrics", "exact"),
    "H1b": ("the same with accumulation and AdamW", "exact"),
    "H2a": ("GPT-2's token loss, accumulated, with a short tail", "exact"),
    "H2b": ("Llama's token loss, accumulated and clipped", "exact"),
    "H2c": ("a token loss with one sample on each rank", "exact"),
    "H3a": ("BERT's masked language model, whose loss ignores num_items_in_batch", "exact"),
    "H3b": ("BERT's token classification, whose loss ignores num_items_in_batch", "exact"),
    "H4a": ("compute_loss overridden: a mean over samples", "exact"),
    "H4b": ("compute_loss overridden: a mean over tokens", "exact"),
    "H4c": ("compute_loss_func: a sum over num_items_in_batch", "exact"),
    "H4d": ("compute_loss_func: a mean over samples", "exact"),
    "H4e": ("a module of the user's own, accumulated", "exact"),
    "H4f": ("label_smoothing_factor", "near"),
    "H5a": ("ViT with workers and dropped tails", "exact"),
    "H6": ("frozen and unused parameters, evaluation by steps", "exact"),
    "H7a": ("early stopping, and the best checkpoint at the end", "exact"),
    "H7b": ("ReduceLROnPlateau", "exact"),
    "H8": ("resuming after and within an epoch, on ranks and in one process", "exact"),
    "H9": ("predictions, labels, inputs and losses, in the order of the data", "exact"),
    "H10": ("a loader of the user's own, dealt", "exact"),
    "H11": ("T5 with Seq2SeqTrainer and generated predictions", "exact"),
    "R1a": ("a contrastive loss", "refused"),
    "R1b": ("a token mean of a model that does not take num_items_in_batch", "refused"),
    "R2a": ("training on an IterableDataset", "refused"),
    "R2b": ("a loader of the user's own, not dealt", "refused"),
    "R3a": ("weights changed on one rank", "refused"),
    "R3b": ("a training_step of the user's own, not averaged", "refused"),
    "R3c": ("an order of the data that differs between ranks", "refused"),
    "R4a": ("the TrainingArguments of transformers", "refused"),
    "R4b": ("options that cannot be right", "refused"),
    "R5": ("a checkpoint that a rank does not see", "refused"),
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
    if (
        engine == "ddp"
    ):  # transformers then writes weights on rank 0 alone: the other ranks' references have none to load
        cases.remove("case_early_stopping_and_the_best_checkpoint")
    done = run_ranks([PROGRAM, engine, *cases], np, launcher=launcher, timeout_s=500).check()
    assert all(f"passed {case}" in done.out for case in cases)


@pytest.mark.slow
def test_how_far_each_row_is_from_one_process(result: Result) -> None:
    lines = result.check().ranks_output[0].splitlines()
    shown = dict(line.removeprefix("shown ").split(" ", 1) for line in lines if line.startswith("shown "))
    assert shown.keys() == ROWS.keys()
    for row, (attack, verdict) in ROWS.items():
        if verdict == "refused":
            assert "received: " in shown[row] and "fix: " in shown[row], (row, attack, shown[row])
        else:
            assert float(shown[row]) < (1e-10 if verdict == "exact" else 1e-5), (row, attack, shown[row])
    assert "hvdtrain: the loss is not checked on parts" in result.out, "H2c has batches of one sample"
