"""Horovod's own Keras wrapper averages on Keras 3's PyTorch backend, as the recipe's wheel has it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from harness import PROGRAMS, run_ranks

EXACT = 1e-10


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.thorough)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("torch"), request.param)


def run(folder: Path, ranks: int, launcher: str = "horovodrun") -> list[dict[str, Any]]:
    program = PROGRAMS / "keras" / "horovods_torch.py"
    run_ranks([program, folder], ranks, launcher=launcher, env={"KERAS_BACKEND": "torch"}, timeout_s=400).check()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.thorough
def test_the_same_over_mpi(tmp_path: Path) -> None:
    for one in run(tmp_path, 2, "horovodrun --mpi"):
        assert len(one["fits"]) == 13 and max(one["fits"].values()) <= EXACT, one["fits"]


def test_tensorflow_need_not_be_there(found: list[dict[str, Any]]) -> None:
    assert all(one["imported"] == [] for one in found)


@pytest.mark.parametrize(("case", "rows"), [("fits", 13), ("None", 4), ("copies", 7), ("kept", 4), ("first", 2)])
def test_training_is_that_of_one_process(found: list[dict[str, Any]], case: str, rows: int) -> None:
    for one in found:
        assert len(one[case]) == rows and max(one[case].values()) <= EXACT, one[case]


@pytest.mark.parametrize("case", ["sets", "one more", "bfloat16", "values", "broadcasts"])
def test_values_and_what_is_reduced_are_exact(found: list[dict[str, Any]], case: str) -> None:
    assert all(one[case] <= EXACT for one in found), [one[case] for one in found]


def test_without_the_wrapper_training_is_another(found: list[dict[str, Any]]) -> None:
    assert all(one["alone"] > 1e-3 for one in found)


def test_gradients_travel_in_16_bits(found: list[dict[str, Any]]) -> None:
    assert all(1e-8 < one["fp16"] < 1e-3 for one in found), [one["fp16"] for one in found]


def test_local_layers_stay_each_ranks_own(found: list[dict[str, Any]]) -> None:
    for one in found:
        gaps = dict(one["local"])
        assert gaps.pop("all averaged") > 1e-4 and len(gaps) == 2 and max(gaps.values()) <= EXACT, one["local"]


def test_a_saved_model_is_plain_and_goes_on(found: list[dict[str, Any]]) -> None:
    assert all(one["loaded"]["gap"] <= EXACT and one["loaded"]["plain"] for one in found)


def test_callbacks_broadcast_average_and_set_rates(found: list[dict[str, Any]]) -> None:
    size = len(found)
    # lr(e) = 0.2 / size x (e (size - 1) / 3 + 1) at the end of epoch e, then 0.1 to the power of the epochs since
    wanted = [round(0.2 / size * (epoch * (size - 1) / 3 + 1), 6) for epoch in (1, 2, 3)] + [0.2, 0.02, 0.002]
    for one in (of_rank["callbacks"] for of_rank in found):
        assert one["rates"] == pytest.approx(wanted, abs=1e-6)
        assert one["apart"] == 0 and one["told"] >= 1
        assert one["losses"] <= EXACT and one["losses apart"] > 1e-6, one


def test_the_best_models_checkpoint(found: list[dict[str, Any]]) -> None:
    assert all(one["best"][0] == 0 and one["best"][1] > 1e-3 for one in found)


def test_elastic_states(found: list[dict[str, Any]]) -> None:
    assert all(one["elastic"] == {"synced": 1.0, "restored": 1.0, "batch": 20, "iterations": 5} for one in found)


def test_an_overflow_on_one_rank_skips_the_step_on_all(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["overflow"]["apart"] == 0 and one["overflow"]["scale"] < 2**15, one["overflow"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("a scale around it", r"ValueError.*Wrap that one: hvd.DistributedOptimizer\(keras.optimizers.LossScale"),
        ("twice", "ValueError.*it returned"),
        ("a name", "TypeError: DistributedOptimizer takes an optimizer.*not 'sgd'"),
        ("one of PyTorch", "TypeError: DistributedOptimizer takes an optimizer.*not SGD"),
        ("sparse", "ValueError.*sparse_as_dense=True"),
        ("a tape", r"ValueError.*loss.backward\(\)"),
        ("all variables", "RuntimeError.*hvd.broadcast_variables"),
        ("no layer", "ValueError: All local layers must be"),
        ("no variable", "ValueError: All local variables must be of keras.Variable type"),
    ],
)
def test_what_cannot_be_is_refused(found: list[dict[str, Any]], case: str, words: str) -> None:
    assert all(re.match(words, one["refused"][case]) for one in found), [one["refused"][case] for one in found]
