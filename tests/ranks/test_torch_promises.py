"""The loader on two ranks: each sample once, exact positions, the same data, random numbers of each rank's own."""

from __future__ import annotations

import re

import pytest
import torch_cases
from harness import PROGRAMS, Result, run_ranks, together
from limits import Limit, note_all

PROGRAM = torch_cases.FOLDER / "promises.py"
ROWS = {  # row: what was tried, and how it ends
    "T4": ("samples that cannot be read, of a data set that does not announce them, or behind `Subset`", "exact"),
    "T7": ("one loader for two models, one of which accumulates: 8 updates instead of 2", "exact"),
    "T10a": ("a validation loop of one's own counts 11 of 9 samples on 2 ranks", "exact"),
    "T10b": ("the same loop over the training loader, without `torch.no_grad()`", "refused"),
    "T11a": ("two loaders of one length side by side: a sample is mixed up with itself", "refused"),
    "T11b": ("ranks give the loader `x[rank::size]`", "refused"),
    "T11c": ("ranks give the loader a list in another order", "refused"),
    "T11d": ("Python's and numpy's generators are equal on all ranks after `prepare`", "mended"),
    "T11e": ("preparing again does not take synchronised batch-norm off", "mended"),
    "T11f": ("`p.grad` kept without a clone is overwritten by the next update (Horovod)", "mended"),
    "T12b": ("a validation pass without `no_grad` before the first update: each graph is held", "mended"),
    "T13a": ("a checkpoint of a loader that `prepare` was not given", "refused"),
    "T13b": ("a checkpoint before the first update loses a batch", "mended"),
    "T13c": ("a restart after epochs that were left by `break`: 10 updates instead of 8", "mended"),
    "T17d": ("a `DataLoader` given to `prepare`", "refused"),
    "T19d": ("`LR` beside a scheduler of PyTorch's that acts after many epochs", "refused"),
}


@pytest.fixture(scope="module")
def result() -> Result:
    return run_ranks([PROGRAM], 2, timeout_s=180)


@pytest.mark.parametrize("case", torch_cases.names("promises.py"))
def test_promise(case: str, result: Result) -> None:
    assert case in torch_cases.passed(result.out), result.text


def test_limits_of_the_loader(result: Result, limit: Limit) -> None:
    note_all(limit, ROWS, result.check().ranks_output[0].splitlines())


def test_statistics_of_averaged_weights_are_those_of_one_process(limit: Limit) -> None:
    program = PROGRAMS / "torch" / "averaged_weights.py"
    ours, parts = together(
        lambda: run_ranks([program, "1", "50"], 3, timeout_s=90),  # of whose last two one rank has none
        lambda: run_ranks([program, "0", "52"], 2, timeout_s=90),
    )
    gaps = [float(re.findall(r"gap (\S+)", done.check().out)[0]) for done in (ours, parts)]
    assert gaps[0] < 1e-9 < 1e-2 < gaps[1]  # PyTorch's own reads each rank's part
    assert "read rank 0's part of the samples" in parts.err and "rank 0's part" not in ours.err
    limit("T26a", "averaged weights, hvt.update_bn(train, averaged)", exact=gaps[0])
    said = next(line for line in parts.err.splitlines() if "read rank 0's part" in line).partition("hvdtrain: ")[2]
    limit("T26b", "the same by PyTorch's own update_bn: each rank takes those of its part", mended=f"reported: {said}")


def test_a_seed_that_init_replaces_is_reported(limit: Limit) -> None:
    program = PROGRAMS / "torch" / "own_errors.py"
    seeded, plain = together(
        lambda: run_ranks([program, "seed", "7"], 1, timeout_s=60),
        lambda: run_ranks([program, "seed"], 1, timeout_s=60),
    )
    assert "in place of the seed 7" in seeded.check().err and "seed=7" in seeded.err
    assert "in place of" not in plain.check().err
    said = next(line for line in seeded.err.splitlines() if "in place of the seed" in line).partition("hvdtrain: ")[2]
    limit("T31", "torch.manual_seed(7) before init(), which sets a seed of its own", mended=f"reported: {said}")


def test_batch_norm_of_one_value_names_the_tail(limit: Limit) -> None:
    done = run_ranks([PROGRAMS / "torch" / "own_errors.py", "tail"], 1, timeout_s=60)
    assert done.returncode == 1 and 'tail="drop"' in done.err and "per_rank_batch 8" in done.err, done.text
    said = done.err[done.err.index("batch norm in training needs") :]
    limit("T33d", "batch normalisation and a last batch of one sample", refused=said)
