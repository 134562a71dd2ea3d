"""Every loss trains on N ranks as in one process of plain Keras, whatever it divides by, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import PROGRAMS, chosen_cases, run_ranks
from keras_cases import BACKENDS
from limits import Limit

PROGRAM = PROGRAMS / "keras" / "losses.py"
ROWS = {
    "ignore_class": ("A7a", "Keras, ignore_class="),
    "one_rank_ignored": ("A7b", "Keras, ignore_class= and one rank's labels all ignored"),
    "mask_zero": ("A7c", "Keras, Embedding(mask_zero=True)"),
    "masking_lstm": ("A7d", "Keras, Masking and an LSTM"),
    "sum": ("A8a", 'Keras, reduction="sum"'),
    "class_weight": ("K5a", "class weights: loader(..., class_weight=)"),
    "weights_zero_on_a_rank": ("K5b", "sample weights, all zero on one rank: loader((x, y, sample_weight))"),
}
EXACT = [*ROWS, "mean_of_weights", "two_outputs"]
REFUSED = {
    "none": ("ConfigError", "must be one number", "reduction=None in SparseCategoricalCrossentropy"),
    "dice_of_the_batch": ("ReplicaError", "its pieces", "6 samples", "Dice(axis=(1, 2, 3))", "verify=False"),
    "balance_in_training": ("ReplicaError", "its pieces", "6 samples"),
    "added_to_the_whole": ("ReplicaError", "its pieces", "6 samples", "also with whole=True"),
    "batchnorm_of_ones_own": ("ReplicaError", "its pieces", "keras.layers.BatchNormalization"),
    "contrast_of_single_samples": ("ReplicaError", "its pieces", "2 samples"),
    "divides_otherwise_later": ("ReplicaError", "its pieces", "6 samples", "whole=True"),
}
# Keras on torch rounds losses and matrix products to float32
TOLERANCE = {"tensorflow": 1e-10, "torch": 2e-6}

Outcome = tuple[dict[str, list[np.ndarray]], dict[str, Any]]


def run(backend: str, ranks: int, folder: Path, cases: list[str]) -> Outcome:
    out = folder / f"{ranks}.npz"
    run_ranks([PROGRAM, out, *cases], ranks, env={"KERAS_BACKEND": backend}, timeout_s=420).check()
    stored = np.load(out)
    weights: dict[str, list[np.ndarray]] = {}
    for key in stored.files:
        weights.setdefault(key.rpartition("/")[0], []).append(stored[key])
    return weights, json.loads(Path(f"{out}.json").read_text())


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def one(request: pytest.FixtureRequest, backend: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Plain Keras, with every import of Horovod and hvdtrain blocked."""
    exact = [case for case in chosen_cases(request) if case not in REFUSED]
    return run(backend, 1, tmp_path_factory.mktemp("one"), exact)


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, backend: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(backend, 2, tmp_path_factory.mktemp("two"), chosen_cases(request))


@pytest.mark.parametrize("case", EXACT)
def test_two_ranks_equal_plain_keras(case: str, backend: str, one: Outcome, two: Outcome, limit: Limit) -> None:
    assert "error" not in two[1][case], two[1][case]
    error = max(float(np.abs(x - y).max()) for x, y in zip(one[0][case], two[0][case], strict=True))
    assert error <= TOLERANCE[backend], case
    for name, values in one[1][case]["history"].items():
        if name in ("loss", "accuracy"):  # an output's loss is logged as a mean of batches, whatever their size
            bound = 1e-9 if backend == "tensorflow" else 1e-5
            np.testing.assert_allclose(two[1][case]["history"][name], values, rtol=bound, err_msg=case)
    if case in ROWS and backend == "tensorflow":
        limit(*ROWS[case], exact=error)


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_decompose_is_refused(case: str, two: Outcome, limit: Limit) -> None:
    error = two[1][case]["error"]
    for text in REFUSED[case]:
        assert text in error, error
    if case == "none":
        limit("A8b", "Keras, Loss(reduction=None)", refused=error)
    if case == "divides_otherwise_later":
        limit("K21a", "a loss that divides otherwise in a later batch than in the first", refused=error)
