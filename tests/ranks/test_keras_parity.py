"""N ranks x batch B end with the weights of one process x batch N·B, in every configuration the adapter
supports.

Low-precision policies round with the batch size: their twin in one process accumulates the ranks' batches one
by one. The negative twin (averaging off) must come out different, or these tests could not fail.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import PROGRAMS, run_ranks
from limits import Limit

PROGRAM = PROGRAMS / "keras" / "matrix.py"
OF_TORCH = ["sgd", "fp16"]
EXACT = ["sgd", "accumulate_clip", "deferred_tail", "fp16", "loss_scale", "embedding_adam", "jit_compile"]
THOROUGH = ["global_clipnorm", "multi", "embedding_accumulate", "embedding_clip", "embedding_dense", "muon"]
# what is not exact by nature: compression, and Muon's matrix products, which Keras on torch rounds to float32
TOLERANCE = {("fp16", "tensorflow"): 1e-3, ("fp16", "torch"): 1e-3, ("muon", "torch"): 1e-5}


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
    """Returns a backend's chosen cases in one process, with every import of Horovod blocked, and on two ranks."""
    items: list[Any] = request.session.items
    here = [item.callspec.params for item in items if item.module is request.module]

    @functools.cache
    def of(backend: str) -> tuple[Outcome, Outcome]:
        cases = sorted({its["case"] for its in here if its["backend"] == backend})
        one, two = (run(backend, ranks, tmp_path_factory.mktemp("parity"), cases) for ranks in (1, 2))
        return one, two

    return of


def difference(a: Outcome, b: Outcome, case: str) -> float:
    """max |dw| over all weights of a case."""
    return max(float(np.abs(x - y).max()) for x, y in zip(a.weights[case], b.weights[case], strict=True))


def each(cases: list[str], of_torch: list[str]) -> pytest.MarkDecorator:
    ordinary = [("tensorflow", case) for case in cases if case not in THOROUGH] + [("torch", case) for case in of_torch]
    every = [(backend, case) for backend in ("tensorflow", "torch") for case in cases]
    marked = [pytest.param(*one, marks=[pytest.mark.thorough] * (one not in ordinary)) for one in every]
    return pytest.mark.parametrize(("backend", "case"), marked)


@each([*EXACT, *THOROUGH], OF_TORCH)
def test_two_ranks_equal_one_process(case: str, backend: str, trained: Trained, limit: Limit) -> None:
    one, two = trained(backend)
    tolerance = TOLERANCE.get((case, backend), 1e-10)
    facts, alone = two.facts[case], one.facts[case]
    assert facts["equal"], "replicas differ"
    assert difference(one, two, case) <= tolerance
    assert facts["iterations"] == alone["iterations"]
    assert facts["proof"].startswith("averaging proven"), facts["proof"]
    for name, values in alone["history"].items():  # metric states are float32
        np.testing.assert_allclose(facts["history"][name], values, rtol=1e-3 if tolerance > 1e-9 else 2e-6)
    if (case, backend) == ("sgd", "torch"):
        limit("K18", "Keras on PyTorch, layers and a loss that keep float64", exact=difference(one, two, case))


@each(["mixed_float16"], ["mixed_float16"])
def test_low_precision_equals_one_process_over_the_same_micro_batches(
    case: str, backend: str, trained: Trained
) -> None:
    one, two = trained(backend)
    assert two.facts[case]["equal"]
    assert difference(one, two, case) == 0.0


@each(["off"], ["off"])
def test_without_averaging_the_parity_fails(case: str, backend: str, trained: Trained) -> None:
    """The negative twin: the same comparison is red when nothing averages."""
    one, two = trained(backend)
    assert not two.facts[case]["equal"]
    assert difference(one, two, case) > 1e-3


@each(["jit_compile"], [])
def test_xla_is_switched_off_and_said_so(case: str, backend: str, trained: Trained) -> None:
    _, two = trained(backend)
    assert not two.facts[case]["jit"]
    assert two.log.count("jit_compile=True is now False") == 1
