"""What Keras users give as data is dealt over 2 ranks as one process reads it: exact, resumed at the batch."""

from __future__ import annotations

from harness import PROGRAMS
from keras_cases import Ran, each, passed
from limits import Limit

PROGRAM = PROGRAMS / "keras" / "sources.py"
CASES = (
    "generators_of_other_lengths", "weights_of_samples_and_classes", "a_data_set_by_index", "data_of_torch",
    "data_of_tensorflow", "inputs_by_name", "evaluated_and_validated", "predicted",
    "resumed_at_the_batch", "refusals",
)  # fmt: skip


@each(CASES, {"data_of_tensorflow"})
def test_dealt_as_one_process_reads_it(case: str, backend: str, ran: Ran, limit: Limit) -> None:
    passed(ran(backend), case)
    if case == "generators_of_other_lengths":
        error = float(ran(backend)[0][case].split()[1])
        what = "loader(lambda epoch: generator(epoch)) of 11, 15 and 3 batches, the last of one sample"
        limit("K13c", what, exact=error)
