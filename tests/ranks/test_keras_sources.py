"""What Keras users give as data is dealt over 1 and 2 ranks as one process reads it: exact, resumed at the batch."""

from __future__ import annotations

import pytest
from harness import PROGRAMS
from keras_cases import Outcomes, passed, ran
from limits import Limit

PROGRAM = PROGRAMS / "keras" / "sources.py"
CASES = (
    "generators_of_other_lengths", "weights_of_samples_and_classes", "a_data_set_by_index", "data_of_torch",
    "data_of_tensorflow", "inputs_by_name_and_no_targets", "evaluated_and_validated", "predicted",
    "resumed_at_the_batch", "refusals",
)  # fmt: skip
THOROUGH = [pytest.mark.thorough]


@pytest.fixture(
    scope="module",
    params=[
        ("tensorflow", 2), pytest.param(("torch", 2), marks=THOROUGH),
        pytest.param(("tensorflow", 1), marks=THOROUGH), pytest.param(("torch", 1), marks=THOROUGH),
    ],
    ids=lambda its: f"{its[0]}-{its[1]}",
)  # fmt: skip
def ranks(request: pytest.FixtureRequest) -> tuple[str, int]:
    backend, size = request.param
    return backend, size


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, ranks: tuple[str, int], tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    return ran(PROGRAM, request, tmp_path_factory, *ranks, flags=("-W", "ignore"))[1]


@pytest.mark.parametrize("case", CASES)
def test_dealt_as_one_process_reads_it(case: str, outcomes: Outcomes) -> None:
    passed(outcomes, case)


def test_data_of_unknown_length(outcomes: Outcomes, ranks: tuple[str, int], limit: Limit) -> None:
    assert outcomes[0]["generators_of_other_lengths"].startswith("passed")
    if ranks == ("tensorflow", 2):
        error = float(outcomes[0]["generators_of_other_lengths"].split()[1])
        what = "loader(lambda epoch: generator(epoch)) of 11, 15 and 3 batches, the last of one sample"
        limit("K13c", what, exact=error)
