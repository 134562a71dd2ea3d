"""Horovod's own Keras wrapper averages on both backends of Keras 3, as the recipe's wheel has it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from harness import PROGRAMS, run_ranks

EXACT = 1e-10
NUMBERS = {"tensorflow": 41, "torch": 31}  # that must be exact
REFUSED = {
    "tensorflow": {
        "a scale around it": r"ValueError.*Wrap that one: hvd.DistributedOptimizer\(keras.optimizers.LossScale",
        "passes twice": "ValueError.*not both",
        "passes twice, scaled": "ValueError.*not both",
        "a name": "TypeError: DistributedOptimizer takes an optimizer.*not 'sgd'",
    },
    "torch": {
        "a scale around it": r"ValueError.*Wrap that one: hvd.DistributedOptimizer\(keras.optimizers.LossScale",
        "twice": "ValueError.*it returned",
        "a name": "TypeError: DistributedOptimizer takes an optimizer.*not 'sgd'",
        "one of PyTorch": "TypeError: DistributedOptimizer takes an optimizer.*not SGD",
        "sparse": "ValueError.*sparse_as_dense=True",
        "a tape": r"ValueError.*loss.backward\(\)",
        "all variables": "RuntimeError.*hvd.broadcast_variables",
        "no layer": "ValueError: All local layers must be",
        "no variable": "ValueError: All local variables must be of keras.Variable type",
    },
}


@pytest.fixture(scope="module", params=["tensorflow", pytest.param("torch", marks=pytest.mark.thorough)])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def found(backend: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has written."""
    program, folder = PROGRAMS / "keras" / f"horovods_{backend}.py", tmp_path_factory.mktemp("horovods")
    # on PyTorch TensorFlow must not have been imported: those ranks start cold
    launcher = "forked" if backend == "tensorflow" else "horovodrun"
    # Horovod's threads would look for work each millisecond, which costs as much as these cases
    env = {"KERAS_BACKEND": backend, "HOROVOD_ENABLE_XLA_OPS": "1", "HOROVOD_IDLE_CYCLE_TIME": "20"}
    run_ranks([program, folder], 2, launcher=launcher, env=env, timeout_s=400).check()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_training_is_that_of_one_process(found: list[dict[str, Any]], backend: str) -> None:
    for one in found:
        assert len(one["exact"]) == NUMBERS[backend], list(one["exact"])
        assert {name: gap for name, gap in one["exact"].items() if not gap <= EXACT} == {}


def test_without_the_wrapper_training_is_another(found: list[dict[str, Any]]) -> None:
    assert all(min(one["differs"].values()) > 1e-4 for one in found), [one["differs"] for one in found]


def test_gradients_travel_in_16_bits(found: list[dict[str, Any]]) -> None:
    assert all(1e-8 < one["fp16"] < 1e-3 for one in found), [one["fp16"] for one in found]


def test_a_saved_model_is_plain(found: list[dict[str, Any]]) -> None:
    assert all(one["plain"] for one in found)


def test_callbacks_broadcast_and_set_rates(found: list[dict[str, Any]]) -> None:
    # lr(e) = 0.2 / size x (e (size - 1) / 3 + 1) at the end of epoch e, then 0.1 to the power of the epochs since
    wanted = [round(0.1 * (epoch / 3 + 1), 6) for epoch in (1, 2, 3)] + [0.2, 0.02, 0.002]
    for one in (of_rank["callbacks"] for of_rank in found):
        assert one["rates"] == pytest.approx(wanted, abs=1e-6)
        assert one["apart"] == 0 and one["told"] >= 1 and one["losses apart"] > 1e-6, one


def test_elastic_states(found: list[dict[str, Any]], backend: str) -> None:
    wanted = {"synced": 1.0, "restored": 1.0, "batch": 20} | ({"iterations": 5} if backend == "torch" else {})
    assert [one["elastic"] for one in found] == [wanted, wanted]


def test_an_overflow_on_one_rank_skips_the_step_on_all(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["overflow"]["apart"] == 0 and one["overflow"]["scale"] < 2**15, one["overflow"]


def test_what_would_hang_or_train_wrongly_is_refused(found: list[dict[str, Any]], backend: str) -> None:
    for one in found:
        assert [name for name, words in REFUSED[backend].items() if not re.match(words, one["refused"][name])] == [], (
            one
        )
    if backend == "tensorflow":  # a rank that alone traces other gradients
        said = found[1]["refused"]["other gradients"]
        assert "ValueError" in said and "unconnected_gradients" in said


def test_tensorflow_need_not_be_there(found: list[dict[str, Any]], backend: str) -> None:
    assert all(one.get("imported", []) == [] for one in found)


@pytest.mark.thorough
def test_without_xla_ops_the_operation_that_cannot_be_compiled_is_named() -> None:
    """As upstream, XLA's kernels are there when HOROVOD_ENABLE_XLA_OPS asks for them."""
    program = PROGRAMS / "keras" / "horovods_tensorflow.py"
    result = run_ranks([program, "xla"], 2, env={"KERAS_BACKEND": "tensorflow"})
    assert result.returncode != 0
    assert "unsupported operations" in result.err and "HorovodAllreduce" in result.err, result.err
