"""Keras' batch-norm layers normalise by the samples of all ranks, as one process with all of them."""

from __future__ import annotations

import pytest
from harness import PROGRAMS
from keras_cases import Outcomes, passed, ran, refused
from limits import Limit

PROGRAM = PROGRAMS / "keras" / "sync_batchnorm.py"
PASSED = [
    "a_rank_without_samples", "masks", "accumulated_called_twice_and_renormalised",
    "plain_files_and_plain_again", "models_that_share_a_layer",
    "of_a_pytorch_module", "a_ranks_own_batch_is_reported", pytest.param("mixed_precision", marks=pytest.mark.thorough),
]  # fmt: skip
REFUSED = {
    "statistics_of_its_own": ("ConfigError", "own is a Own", "remove synchronized=True"),
    "an_optimizer_alone": ("ConfigError", "prepare(optimizer, sync_batchnorm=True)", "prepare the compiled model"),
}


@pytest.fixture(
    scope="module",
    params=["tensorflow", pytest.param("torch", marks=pytest.mark.thorough)],
    ids=lambda backend: f"{backend}-2",
)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, backend: str, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return ran(PROGRAM, request, tmp_path_factory, backend)[1]


@pytest.mark.parametrize("case", PASSED)
def test_it_trains_as_one_process(case: str, outcomes: Outcomes) -> None:
    passed(outcomes, case)


@pytest.mark.parametrize("case", ["asked_for_by_the_layer"])
def test_a_layer_asks_for_it(case: str, backend: str, outcomes: Outcomes, limit: Limit) -> None:
    passed(outcomes, case)
    if backend == "torch":  # where Keras computes the layer in float32, and refuses synchronized=True
        return
    limit("K8a", "BatchNormalization(synchronized=True)", exact=float(outcomes[0][case].split()[1]))


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, outcomes: Outcomes) -> None:
    refused(outcomes, case, *REFUSED[case])


@pytest.mark.parametrize("case", ["in_a_branch"])
def test_a_branch_is_refused(case: str, backend: str, outcomes: Outcomes) -> None:
    for cases in outcomes:
        wanted = "all must reach the layer in every step" if backend == "tensorflow" else "passed eager"
        assert wanted in cases[case], cases[case]
