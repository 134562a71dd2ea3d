"""Loops and data of the user's own over ranks: right, or refused by every rank; never a hang, never silent."""

from __future__ import annotations

import pytest
from harness import PROGRAMS
from keras_cases import Ran, each, passed, refused
from limits import Limit

PROGRAM = PROGRAMS / "keras" / "loop.py"

# case -> row of docs/limits.md, what was tried, what each rank's error must say
REFUSED = {
    "strided_data": ("K3a", "loader((x[rank::size], ...)), the classic Horovod line", "the data must be the same",
                     "give every rank all the data, not a part such as x[rank::size]"),
    "other_order": ("K3b", "the same data in another order per rank", "the contents of [0], [1] differ"),
    "other_length": ("K3c", "60 samples on one rank, 64 on the other", "60 samples", "64 samples"),
    "other_seed": ("K3d", "loader(..., seed=rank)", "seed=0", "seed=1"),
    "strided_evaluation": ("K3e", "evaluate((x[rank::size], ...))", "the data must be the same"),
    "plain_fit_of_all_data": ("K3f", "fit(x, y) with all data on every rank", "the same 64 samples on all 2 ranks",
                              "hvdtrain.keras.loader((x, y)"),
    "data_set_of_all_data": ("K3g", "a tf.data.Dataset or DataLoader without shards",
                             "the first batch is the same on all 2 ranks", "loader(dataset) of batches"),
    "text_as_data": ("K16i", "text as data", "x must hold numbers", "TextVectorization"),
    "labels_in_a_list": ("K16b", "labels in a list", "builtins.int in list", "np.asarray(y)"),
    "optimizer_out_of_sight": ("K1c", "a train step with an optimizer that the model does not hold",
                               "must be averaged over ranks", "Adam", "a second optimizer must be an attribute"),
    "variables_assigned_by_hand": ("K1d", "a train step that assigns variables by hand",
                                   "replicas must be equal after the first step", "rank 1: sum"),
    "optimizer_without_callbacks": ("K1e", "prepare(optimizer), fit without callbacks, ranks seeded apart",
                                    "replicas must be equal before the first update", "rank 1: sum"),
    "other_batch_than_prepared": ("K4a", "prepare(per_rank_batch=8), loader(16)", "prepare(per_rank_batch=8)",
                                  "loader(per_rank_batch=16)"),
    "progress_without_initial_epoch": ("K4c", "a restored run without initial_epoch=", "initial_epoch=0",
                                       "initial_epoch=progress.epoch"),
    "mid_epoch_without_its_counts": ("K4d", "data that resumes in mid-epoch, and counts that do not",
                                     "skips 16 samples of epoch 2", "model_state(model)"),
    "a_callback_that_sets_the_rate": ("K4e", "lr= and ReduceLROnPlateau", "the learning rate cannot be set elsewhere",
                              "ReduceLROnPlateau"),
    "a_callback_of_the_users_sets_the_rate": ("K4f", "lr= and a callback of the user's that sets the rate",
                                "rate cannot be set elsewhere with lr=", "lr= had set 0.2, epoch 1 begins with 0.01"),
    "several_rates": ("K16c", "lr= with a MultiOptimizer", "lr= cannot set several learning rates", "2 optimizers"),
    "unknown_length": ("K13a", "a generator of unknown length, 4 against 5 batches", "so it must be known",
                       "steps_per_epoch"),
    "data_that_ends_early": ("K13b", "data that ends before steps_per_epoch", "ended after 3 of 5 steps", "repeat()"),
    "unequal_first_epochs": ("K14", "another initial_epoch per rank", "'initial epoch': 0", "'initial epoch': 1",
                             "give every rank the same initial_epoch="),
    "model_of_keras_2": ("K16d", "a model of tf_keras (Keras 2)", "tf_keras.src", "are Keras 2"),
}  # fmt: skip
# case -> row, what was tried, what it must have found, what to write
RIGHT = {
    "data_set_of_own_shard": ("", "", "equal", ""),
    "tensors_and_no_targets": ("K16e", "y=None, and tensors as data", "", "taken; error below 1e-6 in float32"),
    "optimizer_in_a_dict": ("K1a", "a second optimizer in a dict of the model", "equal", "averaged"),
    "optimizer_of_a_submodel": ("K1b", "a sub-model's own optimizer", "equal", "averaged"),
    "batches_of_four": ("K16f", "a train step that takes 4-tuples", "equal", "trains, replicas equal"),
    "a_fit_for_each_epoch": ("K4b", "one fit per epoch with fresh callbacks", "6 rates", "the rates of one fit"),
    "mid_epoch_restored": ("K4g", "a checkpoint of mid-epoch, with data that does not keep its place",
                           "trained, Progress(epoch=3, step=12, samples_seen=192, samples_in_epoch=0)",
                           "fit continues with the remaining samples"),
    "several_rates_recorded": ("K16g", "run= with a MultiOptimizer", "trained", "records the first one's rate"),
    "stop_on_one_rank": ("K12b", "a callback stops one rank at step 2", "2 updates, equal", "all stop after step 2"),
    "stop_on_one_rank_only_there": ("K12c", "a callback that only one rank has stops it at step 2", "2 updates, equal",
                                    "all stop after step 2"),
    "traced_once": ("", "", "traced once, equal", ""),
    "stop_at_an_epochs_end_of_one_rank": ("K12d", "one rank stops at an epoch's end; then evaluate",
                                          "2 updates, equal", "all stop after that epoch"),
    "early_stopping_before_ours": ("K12e", "EarlyStopping before our callbacks", "8 updates, equal",
                                   "ours come first: it sees all ranks' numbers"),
    "nan_on_one_rank": ("K12a", "TerminateOnNaN, one bad sample on one rank", "1 updates", "all stop after that step"),
    "keras_noise": ("K7a", "unseeded keras.random in a train step", "4 draws", "differs by rank, resumes bit for bit"),
    "numpy_and_python_noise": ("K7b", "numpy's and Python's generators in an eager train step", "4 draws",
                               "differs by rank, resumes bit for bit"),
}  # fmt: skip


@each(REFUSED)
def test_every_rank_refuses(case: str, backend: str, ran: Ran, limit: Limit) -> None:
    row, attack, *texts = REFUSED[case]
    error = ran(backend)[0][case]
    refused(ran(backend), case, "ReplicaError" if error.startswith("Replica") else "ConfigError", *texts, "fix: ")
    limit(row, attack, refused=error)


@each(RIGHT, {"traced_once"})
def test_what_is_right_passes(case: str, backend: str, ran: Ran, limit: Limit) -> None:
    row, attack, found, now = RIGHT[case]
    passed(ran(backend), case, found)
    if row:
        limit(row, attack, mended=now)


@pytest.mark.parametrize(("backend", "case"), [("tensorflow", "tensorflow_noise")])
def test_noise_of_tensorflows_own_operations(backend: str, case: str, ran: Ran, limit: Limit) -> None:
    """It differs by rank; no checkpoint can hold its state, so a run with checkpoints refuses it."""
    passed(ran(backend), case, "differs")
    limit("K7c", "tf.random in a train step", mended="differs by rank")
    error = ran(backend)[0][case].partition("refused ")[2]
    assert "RandomStandardNormal" in error and "keras.random" in error, error
    limit("K7d", "tf.random in a train step of a run with checkpoints", refused=error)
