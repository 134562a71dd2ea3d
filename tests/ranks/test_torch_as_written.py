"""Programs as users write them, on two ranks: exact, or refused by name."""

from __future__ import annotations

import pytest
import torch_cases
from harness import Result, run_ranks
from limits import Limit, note_all

PROGRAM = torch_cases.FOLDER / "as_written.py"
ROWS = {  # row: what was tried, and how it ends
    "T21a": ("a loss of all anchors over the positives, weighed by the positives, of which a rank has none", "refused"),
    "T21b": ("the same loss of the whole batch", "exact"),
    "T22a": ("a compiled model that gives its own loss and leaves labels out, without weight=", "refused"),
    "T22b": ("the same with weight=", "exact"),
    "T22c": ("a right loss within the model that is next to nothing, of which rounding is left", "mended"),
    "T23": ("a refused update, caught and tried again four times", "refused"),
    "T24": ("`torch.nn.SyncBatchNorm` left in a model", "exact"),
    "T25a": ("weights reinitialized on each rank after an update, then `evaluate`", "refused"),
    "T25b": ("the same, then a checkpoint", "refused"),
    "T25c": ("the same, then the next epoch", "refused"),
    "T27": ("`prepare` without a loader, and a plain `DataLoader`: all ranks train on the same batches", "refused"),
    "T27b": ("`hvt.loader`, and `prepare` without it", "refused"),
    "T28": ("`loss / k` left in beside `accumulate=k`", "refused"),
    "T32a": ("the loss that `optimizer.step(closure)` returns", "exact"),
    "T32b": ("`copy.deepcopy(optimizer)`", "mended"),
    "T32c": ("a sum divided by `2 * len(x)` on two ranks", "refused"),
    "T32d": ("the same as `/ 2 / len(x)`", "exact"),
    "T32e": ("`check` with `Embedding(max_norm=)`, which scales its weights in a forward pass", "mended"),
    "T33a": ("a GradScaler of one's own with `accumulate=2`, stepping on each batch", "refused"),
    "T33b": ("a mask that is empty on a rank, without weight=", "refused"),
    "T33c": ("the same with weight=", "exact"),
    "T33d": ("a mean over the entries of two losses, with weight=", "exact"),
    "T36a": ("sync_batchnorm, and a rank whose samples have no labels: what goes through their statistics", "exact"),
    "T36b": ("sync_batchnorm and a list of means, of which each rank lacks another; accumulate=1 and 2", "exact"),
    "T36c": ("a gradient penalty (create_graph=True) through synchronised batch norm", "exact"),
    "T36d": ("a list of means with learned weights, one of which counts nothing on a rank", "exact"),
    "T37a": ("a head outside of the prepared model, stepped by a plain optimizer of its own", "refused"),
    "T37b": ("the same as a part of the model, with a group of its own", "exact"),
    "T37c": ("a plain optimizer of another model, in a loop of several ranks", "mended"),
    "T37d": ("an optimizer made after prepare(), under the name of the prepared one", "mended"),
    "T38a": ("a loss of the whole batch plus one of this rank's outputs", "refused"),
    "T38b": ("both of the whole batch", "exact"),
    "T38c": ("a sum over the whole batch, divided by this rank's len(x)", "mended"),
    "T40a": ("`hvt.whole` of a list of n outputs [n]: n heads, or n samples", "refused"),
    "T40b": ("a buffer that each rank has changed, then `evaluate`", "mended"),
    "T41": ("outputs `[n, 1]` minus labels `[n]`", "refused"),
}


@pytest.fixture(scope="module")
def result() -> Result:
    return run_ranks([PROGRAM], 2, timeout_s=180)


@pytest.mark.parametrize("case", torch_cases.names("as_written.py"))
def test_a_program_is_exact_or_refused(case: str, result: Result) -> None:
    assert case in torch_cases.passed(result.out), result.text


def test_limits_of_programs(result: Result, limit: Limit) -> None:
    note_all(limit, ROWS, result.check().ranks_output[0].splitlines())
