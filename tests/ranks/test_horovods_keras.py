"""Horovod's own Keras wrapper averages on Keras 3, as the recipe's wheel has it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from harness import PROGRAMS, run_ranks

EXACT = 1e-10


SIZES = [2, pytest.param(3, marks=pytest.mark.thorough)]


def reports(name: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank of a program has written."""
    program = [PROGRAMS / "keras" / name, folder]
    run_ranks(program, ranks, env={"KERAS_BACKEND": "tensorflow"}, timeout_s=400).check()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module", params=SIZES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return reports("horovods_own.py", request.param, tmp_path_factory.mktemp("own"))


def test_fits_are_those_of_one_process(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert len(one["optimizers"]) == 13 and max(one["optimizers"].values()) <= EXACT, one["optimizers"]
        assert one["tape"] <= EXACT


def test_without_the_wrapper_they_are_not(found: list[dict[str, Any]]) -> None:
    assert all(one["alone"] > 1e-3 for one in found)


def test_a_saved_model_is_plain_and_goes_on(found: list[dict[str, Any]]) -> None:
    assert all(one["loaded"]["gap"] <= EXACT and one["loaded"]["plain"] for one in found)


def test_callbacks_broadcast_and_set_rates(found: list[dict[str, Any]]) -> None:
    size = len(found)
    # lr(e) = 0.2 / size x (e (size - 1) / 3 + 1) at the end of epoch e, then 0.1 to the power of the epochs since
    wanted = [round(0.2 / size * (epoch * (size - 1) / 3 + 1), 6) for epoch in (1, 2, 3)] + [0.2, 0.02, 0.002]
    for one in found:
        assert one["callbacks"]["rates"] == pytest.approx(wanted, abs=1e-6)
        assert one["callbacks"]["apart"] == 0 and one["callbacks"]["told"] >= 1


def test_local_layers_stay_each_ranks_own(found: list[dict[str, Any]]) -> None:
    for one in found:
        gaps = dict(one["local"])
        assert gaps.pop("all averaged") > 1e-4 and len(gaps) == 4 and max(gaps.values()) <= EXACT, one["local"]


def test_gradients_travel_in_16_bits(found: list[dict[str, Any]]) -> None:
    assert all(1e-8 < one["fp16"] < 1e-3 for one in found), [one["fp16"] for one in found]


def test_the_best_models_checkpoint(found: list[dict[str, Any]]) -> None:
    for one in found:
        of_the_best, of_the_last = one["best"]
        assert of_the_best == 0 and of_the_last > 1e-3


@pytest.mark.thorough
def test_adasum_over_mpi(tmp_path: Path) -> None:
    program = [str(PROGRAMS / "keras" / "horovods_own.py"), str(tmp_path), "adasum"]
    run_ranks(program, 2, launcher="horovodrun --mpi", env={"KERAS_BACKEND": "tensorflow"}, timeout_s=400).check()
    for rank in (0, 1):
        one = json.loads((tmp_path / f"{rank}.json").read_text())["adasum"]
        assert one["gap"] <= EXACT and one["mean"] > 1e-4, one


def test_elastic_states(found: list[dict[str, Any]]) -> None:
    assert all(one["elastic"] == {"synced": 1.0, "restored": 1.0, "batch": 20} for one in found)


def test_an_overflow_on_one_rank_skips_the_step_on_all(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["overflow"]["apart"] == 0 and one["overflow"]["scale"] < 2**15, one["overflow"]


def test_sync_batch_norm_is_that_of_all_samples(found: list[dict[str, Any]]) -> None:
    for one in found:
        gaps = dict(one["batch norm"])
        assert gaps.pop("alone") > 1e-4 and len(gaps) == 3 and max(gaps.values()) <= EXACT, one["batch norm"]


@pytest.fixture(scope="module", params=SIZES)
def edges(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return reports("horovods_edges.py", request.param, tmp_path_factory.mktemp("edges"))


def test_gradients_that_are_none_on_some_ranks_count_as_zeros(edges: list[dict[str, Any]]) -> None:
    for one in edges:
        gaps = one["None on some ranks"]
        assert len(gaps) == 11 and max(gaps.values()) <= EXACT, gaps


def test_copies_stay_distributed(edges: list[dict[str, Any]]) -> None:
    for one in edges:
        assert len(one["copies"]) == 7 and max(one["copies"].values()) <= EXACT, one["copies"]


def test_the_wrapped_optimizer_keeps_what_it_has(edges: list[dict[str, Any]]) -> None:
    for one in edges:
        assert len(one["kept"]) == 3 and max(one["kept"].values()) <= EXACT, one["kept"]


def test_the_first_step_is_taken_at_rank_0s_weights(edges: list[dict[str, Any]]) -> None:
    assert all(one["first step"] <= EXACT for one in edges), [one["first step"] for one in edges]


@pytest.mark.parametrize("case", ["passes", "clipped", "in functions"])
def test_no_gradient_is_lost_or_counted_twice(edges: list[dict[str, Any]], case: str) -> None:
    for one in edges:
        assert one[case] and max(one[case].values()) <= EXACT, one[case]


def test_a_rank_may_make_an_optimizer_more(edges: list[dict[str, Any]]) -> None:
    assert all(one["one more"] <= EXACT for one in edges), [one["one more"] for one in edges]


def test_all_reduce_takes_variables_and_arrays_in_16_bits(edges: list[dict[str, Any]]) -> None:
    assert all(one["16 bits"] == 0 for one in edges), [one["16 bits"] for one in edges]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("a scale around it", r"ValueError.*Wrap that one: hvd.DistributedOptimizer\(keras.optimizers.LossScale"),
        ("passes twice", "ValueError.*not both"),
        ("passes twice, scaled", "ValueError.*not both"),
        ("a name", "TypeError: DistributedOptimizer takes an optimizer.*not 'sgd'"),
    ],
)
def test_what_would_hang_or_train_wrongly_is_refused(edges: list[dict[str, Any]], case: str, words: str) -> None:
    assert all(re.match(words, one["refused"][case]) for one in edges), [one["refused"][case] for one in edges]


def test_a_rank_that_alone_traces_other_gradients_is_told(edges: list[dict[str, Any]]) -> None:
    assert "ValueError" in (said := edges[-1]["refused"]["other gradients"]) and "unconnected_gradients" in said
