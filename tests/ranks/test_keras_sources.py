"""What Keras users give as data is dealt over 2 ranks as one process reads it: exact, resumed at the batch."""

from __future__ import annotations

import pytest
from harness import PROGRAMS
from keras_cases import Outcomes, passed, ran
from limits import Limit

PROGRAM = PROGRAMS / "keras" / "sources.py"
CASES = (
    "generators_of_other_lengths", "weights_of_samples_and_classes", "a_data_set_by_index", "data_of_torch",
    "data_of_tensorflow", "inputs_by_name", "evaluated_and_validated", "predicted",
    "resumed_at_the_batch", "refusals",
)  # fmt: skip


@pytest.fixture(
    scope="module",
    params=["tensorflow", pytest.param("torch", marks=pytest.mark.thorough)],
    ids=lambda backend: f"{backend}-2",
)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, backend: str, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return ran(PROGRAM, request, tmp_path_factory, backend, flags=("-W", "ignore"))[1]


@pytest.mark.parametrize("case", CASES)
def test_dealt_as_one_process_reads_it(case: str, outcomes: Outcomes) -> None:
    passed(outcomes, case)


def test_data_of_unknown_length(outcomes: Outcomes, backend: str, limit: Limit) -> None:
    if backend == "tensorflow":
        error = float(outcomes[0]["generators_of_other_lengths"].split()[1])
        what = "loader(lambda epoch: generator(epoch)) of 11, 15 and 3 batches, the last of one sample"
        limit("K13c", what, exact=error)
