"""Programs of Keras' guides on two ranks have the weights, history, evaluation and predictions of plain Keras."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harness import PROGRAMS, run_ranks
from keras_cases import by_backend, each

PROGRAM = PROGRAMS / "keras" / "guides.py"
NAMES = re.findall(r"^@program\(\d+\)\ndef (\w+)", PROGRAM.read_text(encoding="utf-8"), re.MULTILINE)
ON_TENSORFLOW = {"metric_learning_of_an_unbuilt_model", "simclr", "loop_from_scratch"}
EXACT = 1e-10

Outcome = dict[str, np.ndarray]
Outcomes = Callable[[str], tuple[Outcome, Outcome]]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Of a backend's chosen programs: of plain Keras, with every import of Horovod and hvdtrain blocked, and of two
    ranks."""

    def run(backend: str, cases: list[str]) -> tuple[Outcome, Outcome]:
        folder = tmp_path_factory.mktemp("guides")

        def of(ranks: int) -> Outcome:
            out: Path = folder / f"{ranks}.npz"
            run_ranks([PROGRAM, out, *cases], ranks, env={"KERAS_BACKEND": backend}, timeout_s=400).check()
            return dict(np.load(out))

        return of(1), of(2)

    return by_backend(request, run)


@each(NAMES, ON_TENSORFLOW)
def test_two_ranks_equal_plain_keras(backend: str, case: str, outcomes: Outcomes) -> None:
    plain, ranks = ({key: its[key] for key in its if key.startswith(f"{case}/")} for its in outcomes(backend))
    assert set(plain) == set(ranks) and any("/weights/" in key for key in plain)
    for key, values in plain.items():
        np.testing.assert_allclose(ranks[key], values, rtol=EXACT, atol=EXACT, equal_nan=False, err_msg=key)
