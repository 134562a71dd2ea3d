"""Every loss trains on N ranks as in one process of plain Keras, whatever it divides by, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import PROGRAMS, run_ranks
from limits import Limit

PROGRAM = PROGRAMS / "keras" / "losses.py"
# the ways of a case: accumulation, samples (25 leave a tail of one, so that a rank has none)
WAYS = ("1/25", "3/44")
EXACT = [
    "ce", "ignore_class", "one_rank_ignored", "mask_zero", "masking_lstm", "mask_and_weights", "sample_weight",
    "weights_zero_on_a_rank", "mean_of_weights", "class_weight", "class_weight_of_soft_labels", "smoothing", "focal",
    "dice", "huber", "sum", "masked_sum", "two_outputs", "lists", "two_losses_in_one", "add_loss", "regularised",
    "activity",
]  # fmt: skip
QUICK = [
    "ignore_class", "one_rank_ignored", "mask_zero", "masking_lstm", "mean_of_weights", "weights_zero_on_a_rank",
    "class_weight", "sum", "two_outputs", "none", "dice_of_the_batch", "balance_in_training", "batchnorm_of_ones_own",
    "added_to_the_whole",
    "contrast_of_single_samples", "divides_otherwise_later",
]  # fmt: skip
REFUSED = {
    "none": ("ConfigError", "must be one number", "reduction=None in SparseCategoricalCrossentropy"),
    "dice_of_the_batch": ("ReplicaError", "its pieces", "6 samples", "Dice(axis=(1, 2, 3))", "verify=False"),
    "balance_in_training": ("ReplicaError", "its pieces", "6 samples"),
    "added_to_the_whole": ("ReplicaError", "its pieces", "6 samples", "with whole=True too"),
    "batchnorm_of_ones_own": ("ReplicaError", "its pieces", "keras.layers.BatchNormalization"),
    "contrast_of_single_samples": ("ReplicaError", "its pieces", "2 samples"),
    "divides_otherwise_later": ("ReplicaError", "its pieces", "6 samples", "whole=True"),
}
# what ranks that weigh by samples only get wrong
BY_SAMPLES_WRONG = ["ignore_class", "mask_zero", "two_outputs", "sum"]
# Keras on torch rounds losses and matrix products to float32
TOLERANCE = {"tensorflow": 1e-10, "torch": 2e-6}

Outcome = tuple[dict[str, list[np.ndarray]], dict[str, Any]]


def run(backend: str, ranks: int, folder: Path, cases: list[str], **env: str) -> Outcome:
    out = folder / f"{ranks}{''.join(env)}.npz"
    run_ranks(
        [PROGRAM, out, *cases], ranks, env={"KERAS_BACKEND": backend, **env}, timeout_s=420,
    ).check()  # fmt: skip
    stored = np.load(out)
    weights: dict[str, list[np.ndarray]] = {}
    for key in stored.files:
        weights.setdefault(key.rpartition("/")[0], []).append(stored[key])
    return weights, json.loads(Path(f"{out}.json").read_text())


@pytest.fixture(scope="module", params=["tensorflow", pytest.param("torch", marks=pytest.mark.thorough)])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> list[str]:
    here = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    return [] if any(item.get_closest_marker("thorough") for item in here) else QUICK


@pytest.fixture(scope="module")
def one(backend: str, cases: list[str], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Plain Keras, with every import of Horovod and hvdtrain blocked."""
    return run(backend, 1, tmp_path_factory.mktemp("one"), cases)


@pytest.fixture(scope="module")
def two(backend: str, cases: list[str], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(backend, 2, tmp_path_factory.mktemp("two"), cases)


def gap(a: Outcome, b: Outcome, key: str) -> float:
    assert len(a[0][key]) == len(b[0][key]), b[1][key]
    return max(float(np.abs(x - y).max()) for x, y in zip(a[0][key], b[0][key], strict=True))


def check(case: str, backend: str, one: Outcome, many: Outcome) -> float:
    for way in WAYS:
        key = f"{case}/{way}"
        assert "error" not in many[1][key], many[1][key]
        assert gap(one, many, key) <= TOLERANCE[backend], key
        logged = many[1][key]["history"]
        for name, values in one[1][key]["history"].items():
            if way.endswith("25") and name not in ("loss", "accuracy"):
                continue  # Keras on TensorFlow logs an output's loss as a mean of batches, whatever their size
            np.testing.assert_allclose(
                logged[name], values, rtol=1e-9 if backend == "tensorflow" else 1e-5, err_msg=key
            )
    return max(gap(one, many, f"{case}/{way}") for way in WAYS)


ROWS = {
    "ignore_class": ("A7a", "Keras, ignore_class="),
    "one_rank_ignored": ("A7b", "Keras, ignore_class= and one rank's labels all ignored"),
    "mask_zero": ("A7c", "Keras, Embedding(mask_zero=True)"),
    "masking_lstm": ("A7d", "Keras, Masking and an LSTM"),
    "sum": ("A8a", 'Keras, reduction="sum"'),
    "class_weight": ("K5a", "class weights: loader(..., class_weight=)"),
    "weights_zero_on_a_rank": ("K5b", "sample weights, all zero on one rank: loader((x, y, sample_weight))"),
}


@pytest.mark.parametrize("case", [case for case in QUICK if case in EXACT])
def test_two_ranks_equal_plain_keras(case: str, backend: str, one: Outcome, two: Outcome, limit: Limit) -> None:
    error = check(case, backend, one, two)
    if case in ROWS and backend == "tensorflow":
        limit(*ROWS[case], exact=error)


@pytest.mark.thorough
@pytest.mark.parametrize("case", [case for case in EXACT if case not in QUICK])
def test_two_ranks_equal_plain_keras_with_more_losses(case: str, backend: str, one: Outcome, two: Outcome) -> None:
    check(case, backend, one, two)


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["ignore_class", "masking_lstm", "mean_of_weights", "two_outputs", "sum"])
def test_four_ranks_equal_plain_keras(case: str, backend: str, one: Outcome, four: Outcome) -> None:
    check(case, backend, one, four)


@pytest.fixture(scope="module")
def four(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    cases = ["ignore_class", "masking_lstm", "mean_of_weights", "two_outputs", "sum"]
    return run(backend, 4, tmp_path_factory.mktemp("four"), cases)


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_decompose_is_refused(case: str, two: Outcome, limit: Limit) -> None:
    for way in WAYS:
        error = two[1][f"{case}/{way}"]["error"]
        for text in REFUSED[case]:
            assert text in error, error
    if case == "none":
        limit("A8b", "Keras, Loss(reduction=None)", refused=error)
    if case == "divides_otherwise_later":
        limit("K21a", "a loss that divides otherwise in a later batch than in the first", refused=error)


@pytest.mark.thorough
def test_ranks_that_weigh_by_samples_only_are_wrong(backend: str, one: Outcome, tmp_path: Path) -> None:
    """The negative twin."""
    off = run(backend, 2, tmp_path, BY_SAMPLES_WRONG, OFF="1")
    for case in BY_SAMPLES_WRONG:
        assert gap(one, off, f"{case}/1/25") > 1e-4, case
