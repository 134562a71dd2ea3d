"""Losses that divide by samples, tokens or class weights: a pipeline is right, or refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import PROGRAMS, run_ranks
from limits import Limit

PROGRAM = PROGRAMS / "pipeline" / "losses.py"
TOLERANCE = 1e-10

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    result = run_ranks([PROGRAM], 1, timeout_s=240).check()
    lines = [json.loads(line) for line in result.out.splitlines() if line.startswith("{")]
    return {line.pop("loss"): line for line in lines}


def test_equal_to_the_unsplit_model(found: dict[str, Any], limit: Limit) -> None:
    errors = {name: line["off"] for name, line in found.items() if "weighted" in line}
    assert len(errors) == 12
    assert max(errors.values()) <= TOLERANCE, errors
    limit("A6a", "pipeline, 3 micro-batches, `ignore_index`, with `weight=`", exact=errors["ignore_index"])
    limit("A6b", "pipeline, 3 micro-batches, class weights, with `weight=`", exact=errors["class_weights"])


def test_one_number_is_a_weight_for_one_micro_batch(found: dict[str, Any]) -> None:
    received = found["one number"]
    assert received["off"] <= TOLERANCE
    assert "weight=15 for 3 micro-batches" in received["several"] and "a function of the targets" in received["several"]
    assert "received: -1" in received["negative"] and "received: shape (3, 5)" in received["shape"]


def test_a_micro_batch_without_weight_does_no_harm(found: dict[str, Any], limit: Limit) -> None:
    received = found["nothing counts"]
    for remat in ("never", "all"):
        assert received[f"loss_{remat}"] == 0 and received[f"gradients_{remat}"] == 0
    worst = max(received["off_never"], received["off_all"])
    assert worst <= TOLERANCE
    limit("A6c", "pipeline, a micro-batch with all targets ignored, and NaN in its inputs", exact=worst)


REMEDIES = {
    "ignore_index": "weight=lambda y: (y != -100).sum()",
    "pad_id": "weight=lambda y: (y != 0).sum()",
    "class_weights": "weight=lambda y: loss.weight[y].sum()",
    "in_a_function": "a function of the targets that counts",
    "mask": "weight=lambda y: y[1].sum()",
    "sum": 'reduction="mean"',
    "samples_together": "micro_batches=1",
    "batch_std": "a function of the targets",
}


@pytest.mark.parametrize("loss", REMEDIES)
def test_a_mean_that_is_not_over_samples_is_refused_with_its_weight(found: dict[str, Any], loss: str) -> None:
    said, left_alone = found["refused"][loss]
    assert REMEDIES[loss] in said and "fix: " in said, said
    assert left_alone, "no draw, no gradient, no mode may change"


RARE = {
    "pad": "step 1: weight= must equal",
    "nan": "step 1: weight= must equal",
    "mask": "step 1: weight= must equal",
    "pad_later": "step 3: weight= must equal",
    "weights_later": "step 3: weight= must equal",
    "weights_turned_later": "step 3: weight= must equal",
    "count_later": "step 3: weight= must equal",
    "setting_later": "step 3: the loss of a batch",
    "class_weights_later": "step 3: weight= must equal",
    "other_class_weights_later": "step 3: weight= must equal",
}


@pytest.mark.parametrize("case", RARE)
def test_few_samples_or_a_later_step_that_make_the_mean_another_one(found: dict[str, Any], case: str) -> None:
    assert found["rare"][case].startswith(RARE[case]), found["rare"][case]


def test_what_the_refusals_are_for(found: dict[str, Any], limit: Limit) -> None:
    received = found["refused"]
    assert received["later"][0].startswith("nothing raised") and "(y != -100)" in received["later"][1]
    assert "(y != -100)" in received["wrong"]
    assert received["calls"][1] == received["calls"][0] > 7 * 3, "not tried in each step, where each step makes it"
    limit("A6d", "pipeline, `ignore_index`, without `weight=`", refused=received["ignore_index"][0])
    limit("A6e", "pipeline, class weights, without `weight=`", refused=received["class_weights"][0])
    limit("A6f", 'pipeline, `reduction="sum"`', refused=received["sum"][0])


def test_unusual_numbers_and_losses(found: dict[str, Any]) -> None:
    """Complex numbers with and without recomputation, several rows a sample, a loss that the model takes itself."""
    received = dict(found["unusual"])
    text = received.pop("refused")
    assert "one number that the model returns" in text and "weight=len" in text and "y[:, 1:]" in text
    assert len(received) == 4 and max(received.values()) <= TOLERANCE, received
