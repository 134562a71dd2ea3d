"""Keras' batch-norm layers normalise by the samples of all ranks, as one process with all of them."""

from __future__ import annotations

import pytest
from harness import PROGRAMS
from keras_cases import Outcomes, passed, ran, refused
from limits import Limit

PROGRAM = PROGRAMS / "keras" / "sync_batchnorm.py"
THOROUGH = ("eager_steps", "mixed_precision", "layers_that_are_made_late")
PASSED = [
    "a_rank_without_samples", "masks", "accumulated_called_twice_and_renormalised",
    "a_loop_of_ones_own", "plain_files_and_plain_again", "models_that_share_a_layer",
    "of_a_pytorch_module",
    *(pytest.param(case, marks=pytest.mark.thorough) for case in THOROUGH),
]  # fmt: skip
REFUSED = {
    "statistics_of_its_own": ("ConfigError", "own is a Own", "remove synchronized=True"),
    "an_optimizer_alone": ("ConfigError", "prepare(optimizer, sync_batchnorm=True)", "prepare the compiled model"),
}
FOUR = pytest.param(("tensorflow", 4), marks=pytest.mark.thorough, id="tensorflow-4")
TORCH = pytest.param(("torch", 2), marks=pytest.mark.thorough, id="torch-2")


@pytest.fixture(scope="module", params=[pytest.param(("tensorflow", 2), id="tensorflow-2"), TORCH, FOUR])
def ranks(request: pytest.FixtureRequest) -> tuple[str, int]:
    backend, size = request.param
    return backend, size


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, ranks: tuple[str, int], tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    return ran(PROGRAM, request, tmp_path_factory, *ranks)[1]


@pytest.mark.parametrize("case", PASSED)
def test_it_trains_as_one_process(case: str, outcomes: Outcomes) -> None:
    passed(outcomes, case)


@pytest.mark.parametrize("case", ["asked_for_by_the_layer"])
def test_a_layer_asks_for_it(case: str, ranks: tuple[str, int], outcomes: Outcomes, limit: Limit) -> None:
    passed(outcomes, case)
    if ranks[0] == "torch":  # where Keras computes the layer in float32, and refuses synchronized=True
        return
    limit("K8a", "BatchNormalization(synchronized=True)", exact=float(outcomes[0][case].split()[1]))


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, outcomes: Outcomes) -> None:
    refused(outcomes, case, *REFUSED[case])


@pytest.mark.parametrize("case", ["in_a_branch"])
def test_a_branch_is_refused(case: str, ranks: tuple[str, int], outcomes: Outcomes) -> None:
    for cases in outcomes:
        wanted = "all must reach the layer in every step" if ranks[0] == "tensorflow" else "passed eager"
        assert wanted in cases[case], cases[case]
