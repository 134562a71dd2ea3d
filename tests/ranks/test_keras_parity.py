"""Two ranks end with the weights and logs of plain Keras, whatever a loss divides by, with every optimizer and
precision; or the loss is refused.

Low-precision policies round with the batch size: their twin in one process accumulates the ranks' batches one
by one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import PROGRAMS, run_ranks
from keras_cases import by_backend, each
from limits import Limit

PROGRAM = PROGRAMS / "keras" / "parity.py"
ROWS = {
    "ignore_class": ("A7a", "Keras, ignore_class="),
    "one_rank_ignored": ("A7b", "Keras, ignore_class= and one rank's labels all ignored"),
    "mask_zero": ("A7c", "Keras, Embedding(mask_zero=True)"),
    "masking_lstm": ("A7d", "Keras, Masking and an LSTM"),
    "sum": ("A8a", 'Keras, reduction="sum"'),
    "class_weight": ("K5a", "class weights: loader(..., class_weight=)"),
    "weights_zero_on_a_rank": ("K5b", "sample weights, all zero on one rank: loader((x, y, sample_weight))"),
    "info_nce": ("K29a", "a contrastive loss, prepare(model, data, whole=True)"),
    "hardest_quarter": ("K29b", "the hardest quarter of a batch, prepare(model, data, whole=True)"),
    "soft_f1_by_class": ("K29c", "a soft F1 by class, prepare(model, data, whole=True)"),
}
OPTIMIZERS = ["sgd", "stock", "accumulate_clip", "deferred_tail", "fp16", "loss_scale", "embedding_adam", "jit_compile"]
EXACT = [*ROWS, "mean_of_weights", "two_outputs", *OPTIMIZERS]
THOROUGH = ["global_clipnorm", "multi", "embedding_accumulate", "embedding_clip", "embedding_dense", "muon"]
# of its graphs: divisors, losses of the whole batch, branches of a loss scale, XLA
ON_TENSORFLOW = {"one_rank_ignored", "info_nce", "loss_scale", "jit_compile"}
# of weights and logs: in float16, and in what Keras on PyTorch casts to float32
ROUNDED = {"fp16": (1e-3, 1e-3), "stock": (2e-6, 1e-5)}
REFUSED = {
    "none": ("ConfigError", "must be one number", "reduction=None in SparseCategoricalCrossentropy"),
    "dice_of_the_batch": ("ReplicaError", "its pieces", "6 samples", "Dice(axis=(1, 2, 3))", "verify=False"),
    "balance_in_training": ("ReplicaError", "its pieces", "6 samples"),
    "added_to_the_whole": ("ReplicaError", "its pieces", "6 samples", "also with whole=True"),
    "batchnorm_of_ones_own": ("ReplicaError", "its pieces", "keras.layers.BatchNormalization"),
    "contrast_of_single_samples": ("ReplicaError", "its pieces", "2 samples"),
    "divides_otherwise_later": ("ReplicaError", "its pieces", "6 samples", "whole=True"),
}


@dataclass(frozen=True)
class Outcome:
    weights: dict[str, list[np.ndarray]]
    facts: dict[str, Any]
    log: str


Trained = Callable[[str], tuple[Outcome, Outcome]]


def run(backend: str, ranks: int, folder: Path, cases: list[str]) -> Outcome:
    out = folder / f"{backend}{ranks}.npz"
    ended = run_ranks([PROGRAM, out, *cases], ranks, env={"KERAS_BACKEND": backend}, timeout_s=420).check()
    stored = np.load(out)
    weights: dict[str, list[np.ndarray]] = {}
    for key in stored.files:
        weights.setdefault(key.rpartition("/")[0], []).append(stored[key])
    return Outcome(weights, json.loads(Path(f"{out}.json").read_text()), ended.text)


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Returns a backend's chosen cases of plain Keras, with every import of Horovod and hvdtrain blocked, and of two
    ranks."""

    def both(backend: str, cases: list[str]) -> tuple[Outcome, Outcome]:
        folder = tmp_path_factory.mktemp("parity")
        alone = [case for case in cases if case not in REFUSED]
        return run(backend, 1, folder, alone), run(backend, RANKS, folder, cases)

    return by_backend(request, both)


RANKS = 2


def difference(a: Outcome, b: Outcome, case: str) -> float:
    """max |dw| over all weights of a case."""
    return max(float(np.abs(x - y).max()) for x, y in zip(a.weights[case], b.weights[case], strict=True))


@each([*EXACT, *THOROUGH], ON_TENSORFLOW, THOROUGH)
def test_two_ranks_equal_plain_keras(case: str, backend: str, trained: Trained, limit: Limit) -> None:
    one, two = trained(backend)
    facts, alone = two.facts[case], one.facts[case]
    assert "error" not in facts, facts
    assert facts["equal"], "replicas differ"
    assert facts["iterations"] == alone["iterations"]
    assert facts["proof"].startswith("averaging proven"), facts["proof"]
    error, (bound, bound_of_logs) = difference(one, two, case), ROUNDED.get(case, (1e-10, 1e-9))
    assert error <= bound, case
    for name, values in alone["history"].items():
        if not name.endswith("_loss"):  # an output's loss is logged as a mean of batches, whatever their size
            np.testing.assert_allclose(facts["history"][name], values, rtol=bound_of_logs, err_msg=case)
    if case in ROWS:
        limit(*ROWS[case], exact=error)
    if (case, backend) == ("sgd", "torch"):
        limit("K18", "Keras on PyTorch, kept from casting float64 to float32", exact=error)


@each(REFUSED)
def test_what_does_not_decompose_is_refused(case: str, backend: str, trained: Trained, limit: Limit) -> None:
    error = trained(backend)[1].facts[case]["error"]
    for text in REFUSED[case]:
        assert text in error, error
    if case == "none":
        limit("A8b", "Keras, Loss(reduction=None)", refused=error)
    if case == "divides_otherwise_later":
        limit("K21a", "a loss that divides otherwise in a later batch than in the first", refused=error)


@each(["mixed_float16"])
def test_low_precision_equals_one_process_over_the_same_micro_batches(
    case: str, backend: str, trained: Trained
) -> None:
    one, two = trained(backend)
    assert two.facts[case]["equal"]
    assert difference(one, two, case) == 0.0


@each(["jit_compile"], ON_TENSORFLOW)
def test_xla_is_switched_off_and_said_so(case: str, backend: str, trained: Trained) -> None:
    _, two = trained(backend)
    assert not two.facts[case]["jit"]
    assert two.log.count("jit_compile=True is now False") == 1
