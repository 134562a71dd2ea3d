"""N ranks x batch B end with the weights of one process x batch N·B, in every configuration the adapter
supports.

Low-precision policies round with the batch size: their twin in one process accumulates the ranks' batches one
by one. The negative twins (averaging off, Horovod's own wrapper) must come out different, or these tests
could not fail.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import PROGRAMS, run_ranks
from limits import Limit

PROGRAM = PROGRAMS / "keras" / "matrix.py"
BACKENDS = ("tensorflow", "torch")
TORCH_ON_DEMAND = pytest.mark.parametrize(
    "backend", ["tensorflow", pytest.param("torch", marks=pytest.mark.thorough)], indirect=True, scope="module"
)
AT_FOUR = ["sgd", "adam", "accumulate_clip", "tail_17", "embedding_adam", "off"]

EXACT = [
    "sgd", "adam", "momentum", "clipnorm", "global_clipnorm", "ema", "accumulate", "accumulate_clip",
    "accumulate_loss_scale", "loss_scale", "schedule", "constraint", "multi", "embedding_sgd", "embedding_adam",
    "embedding_clip", "embedding_accumulate", "embedding_dense", "tail_17", "tail_50_accumulate", "tail_embedding",
    "deferred", "deferred_tail", "subclassed", "own_step", "run_eagerly", "deferred_eagerly", "steps_per_execution",
    "optimizer_first", "jit_compile", "muon", "fp16",
]  # fmt: skip
# like others, with one option more: with `thorough`
MORE = [
    "momentum", "ema", "accumulate", "accumulate_loss_scale", "embedding_sgd", "embedding_dense", "tail_50_accumulate",
    "tail_embedding", "deferred", "deferred_eagerly", "optimizer_first",
]  # fmt: skip
# of Keras' PyTorch backend without `thorough`: one of each mechanism
OF_TORCH = [
    "sgd", "adam", "clipnorm", "accumulate_clip", "embedding_adam", "embedding_accumulate", "tail_17", "deferred_tail",
    "own_step", "fp16",
]  # fmt: skip
MICRO = ["float32", "mixed_bfloat16", "bfloat16", "mixed_float16"]
TENSORFLOW_ONLY = {"steps_per_execution"}
# what is not exact by nature: compression, and Muon's matrix products, which Keras on torch rounds to float32
TOLERANCE = {("fp16", "tensorflow"): 1e-3, ("fp16", "torch"): 1e-3, ("muon", "torch"): 1e-5}


@dataclass(frozen=True)
class Outcome:
    weights: dict[str, list[np.ndarray]]
    facts: dict[str, Any]
    log: str


def run(backend: str, ranks: int, folder: Path, cases: list[str]) -> Outcome:
    out = folder / f"{backend}{ranks}.npz"
    ended = run_ranks(
        [PROGRAM, out, *cases], ranks, env={"KERAS_BACKEND": backend, "MICRO": "2"}, timeout_s=420
    ).check()
    stored = np.load(out)
    weights: dict[str, list[np.ndarray]] = {}
    for key in stored.files:
        weights.setdefault(key.rpartition("/")[0], []).append(stored[key])
    return Outcome(weights, json.loads(Path(f"{out}.json").read_text()), ended.text)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest, backend: str) -> list[str]:
    """What is run: nothing named is everything."""
    here = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    if any(item.get_closest_marker("thorough") for item in here):
        return []
    exact = OF_TORCH if backend == "torch" else [case for case in EXACT if case not in MORE]
    return [*dict.fromkeys([*exact, *MICRO, "off", "batchnorm", "jit_compile"])]


@pytest.fixture(scope="module")
def one(backend: str, cases: list[str], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One process, with every import of Horovod blocked."""
    return run(backend, 1, tmp_path_factory.mktemp("one"), cases)


@pytest.fixture(scope="module")
def two(backend: str, cases: list[str], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(backend, 2, tmp_path_factory.mktemp("two"), cases)


@pytest.fixture(scope="module")
def four(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(backend, 4, tmp_path_factory.mktemp("four"), AT_FOUR)


def difference(a: Outcome, b: Outcome, case: str) -> float:
    """max |dw| over all weights of a case."""
    assert len(a.weights[case]) == len(b.weights[case])
    return max(float(np.abs(x - y).max()) for x, y in zip(a.weights[case], b.weights[case], strict=True))


def skip_where_absent(case: str, backend: str) -> None:
    if case in TENSORFLOW_ONLY and backend != "tensorflow":
        pytest.skip(f"Keras on {backend} has no such thing")


def check_case(case: str, backend: str, one: Outcome, many: Outcome, tolerance: float) -> None:
    assert many.facts[case]["equal"], "replicas differ"
    assert difference(one, many, case) <= tolerance
    assert many.facts[case]["iterations"] == one.facts[case]["iterations"]
    assert many.facts[case]["proof"].startswith("averaging proven"), many.facts[case]["proof"]
    for name, values in one.facts[case]["history"].items():  # metric states are float32
        np.testing.assert_allclose(many.facts[case]["history"][name], values, rtol=1e-3 if tolerance > 1e-9 else 2e-6)


@pytest.mark.parametrize("case", OF_TORCH)
def test_two_ranks_equal_one_process(case: str, backend: str, one: Outcome, two: Outcome, limit: Limit) -> None:
    check_case(case, backend, one, two, TOLERANCE.get((case, backend), 1e-10))
    if (case, backend) == ("sgd", "torch"):
        limit("K18", "Keras on PyTorch, layers and a loss that keep float64", exact=difference(one, two, case))


@TORCH_ON_DEMAND
@pytest.mark.parametrize(
    "case", [pytest.param(it, marks=[pytest.mark.thorough] * (it in MORE)) for it in EXACT if it not in OF_TORCH]
)
def test_two_ranks_equal_one_process_in_every_way(case: str, backend: str, one: Outcome, two: Outcome) -> None:
    skip_where_absent(case, backend)
    check_case(case, backend, one, two, TOLERANCE.get((case, backend), 1e-10))


@pytest.mark.thorough
@TORCH_ON_DEMAND
@pytest.mark.parametrize("case", [case for case in AT_FOUR if case != "off"])
def test_four_ranks_equal_one_process(case: str, backend: str, one: Outcome, four: Outcome) -> None:
    check_case(case, backend, one, four, 1e-10)


@pytest.mark.parametrize("case", MICRO)
def test_low_precision_equals_one_process_over_the_same_micro_batches(case: str, one: Outcome, two: Outcome) -> None:
    assert two.facts[case]["equal"]
    assert difference(one, two, case) == 0.0


@pytest.mark.parametrize("case", ["off"])
def test_without_averaging_the_parity_fails(case: str, backend: str, one: Outcome, two: Outcome) -> None:
    """The negative twin: the same comparison is red when nothing averages."""
    skip_where_absent(case, backend)
    assert not two.facts[case]["equal"]
    assert difference(one, two, case) > 1e-3


@pytest.mark.thorough
@TORCH_ON_DEMAND
def test_without_averaging_four_ranks_fail(backend: str, one: Outcome, four: Outcome) -> None:
    assert not four.facts["off"]["equal"]
    assert difference(one, four, "off") > 1e-3


def test_batchnorm_replicas_are_equal(two: Outcome) -> None:
    assert two.facts["batchnorm"]["equal"], "moving statistics were not made equal"


def test_xla_is_switched_off_and_said_so(two: Outcome) -> None:
    assert not two.facts["jit_compile"]["jit"]
    assert two.log.count("jit_compile=True is now False") == 1
