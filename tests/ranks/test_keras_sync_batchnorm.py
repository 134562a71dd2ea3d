"""Keras' batch-norm layers normalise by the samples of all ranks, as one process with all of them."""

from __future__ import annotations

from harness import PROGRAMS
from keras_cases import Ran, each, passed, refused
from limits import Limit

PROGRAM = PROGRAMS / "keras" / "sync_batchnorm.py"
PASSED = [
    "a_rank_without_samples", "asked_for_by_the_layer", "masks", "accumulated_called_twice_and_renormalised",
    "plain_files_and_plain_again", "models_that_share_a_layer", "of_a_pytorch_module", "a_ranks_own_batch_is_reported",
    "mixed_precision",
]  # fmt: skip
# Keras on PyTorch refuses synchronized=True; graphs that share a layer, and branches
ON_TENSORFLOW = {"asked_for_by_the_layer", "models_that_share_a_layer", "in_a_branch"}
REFUSED = {
    "statistics_of_its_own": ("ConfigError", "own is a Own", "remove synchronized=True"),
    "an_optimizer_alone": ("ConfigError", "prepare(optimizer, sync_batchnorm=True)", "prepare the compiled model"),
}


@each(PASSED, ON_TENSORFLOW)
def test_it_trains_as_one_process(case: str, backend: str, ran: Ran, limit: Limit) -> None:
    passed(ran(backend), case)
    if (case, backend) == ("asked_for_by_the_layer", "tensorflow"):
        limit("K8a", "BatchNormalization(synchronized=True)", exact=float(ran(backend)[0][case].split()[1]))


@each(REFUSED)
def test_what_is_refused(case: str, backend: str, ran: Ran) -> None:
    refused(ran(backend), case, *REFUSED[case])


@each(["in_a_branch"], ON_TENSORFLOW)
def test_a_branch_is_refused(case: str, backend: str, ran: Ran) -> None:
    for cases in ran(backend):
        wanted = "all must reach the layer in every step" if backend == "tensorflow" else "passed eager"
        assert wanted in cases[case], cases[case]
