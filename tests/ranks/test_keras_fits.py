"""Whole fits with validation, callbacks and metrics end as in plain Keras; what `fit` would not read is refused."""

from __future__ import annotations

from harness import PROGRAMS
from keras_cases import Ran, each, passed, refused
from limits import Limit

PROGRAM = PROGRAMS / "keras" / "fits.py"
# case -> the rows it shows, if any
ACCEPTED = {
    "validates_with_a_tail": ("K2a", "validation_data=loader(...) with one sample more than full batches"),
    "validates_fewer_samples_than_ranks": ("K2b", "validation on fewer samples than ranks"),
    "validates_masked_labels": ("K2c", "validation of a loss that ignores labels, with a tail"),
    "stops_early_as_plain_keras": ("K2d", "EarlyStopping and ReduceLROnPlateau on val_loss, with a tail"),
    "evaluates_as_plain_keras": None,
    "every_optimizer": None,
    "metrics_that_give_several_numbers": None,
    "parts_that_a_step_of_ones_own_calls": ("K23a", "a `train_step` of `loader(x)`: its batch is x, and no tuple"),
    "a_step_that_unpacks_x_and_y": ("K25", "`x, y = data` in a `train_step`, with a rank that has no sample"),
    "keras_own_evaluate_and_predict_of_a_loader": ("K22", "model.evaluate(loader) and model.predict(loader)"),
    "validates_own_trackers_on_all_samples_each": (
        "K30a",
        "an own `test_step` with its own trackers, validation_data=(x, y)",
    ),
    "logs_of_a_step_that_no_metric_has": ("K30b", 'a step that returns `{"loss": loss}`, a number and no result'),
    "evaluates_a_loader_in_a_callback": ("K30c", "model.evaluate(loader) and model.predict(loader) in a callback"),
    "masks_with_weights_of_steps": ("K30d", "a mask and weights of each step, mean_with_sample_weight"),
    "losses_of_outputs_of_the_whole_batch": ("K30e", "the losses of two outputs, whole=True, with a tail"),
    "nothing_to_train": ("K30f", "a model without trainable weights"),
    "names_metrics_that_follow_batches": None,
    "a_loss_that_is_next_to_nothing": ("K21b", "a right loss that is next to nothing, of which rounding is left"),
    "averages_a_metric_that_says_so": None,
    "normalises_by_live_samples_only": None,
    "goes_on_accumulating": ("K6", "a second fit in the middle of an accumulated update"),
    "counts_every_step_of_an_execution": ("K8d", "watch_every=2 with steps_per_execution=2"),
    "records_the_loss_of_the_global_batch": ("K8c", "the loss of each step in events.jsonl"),
    "halves_before_the_sum": None,
    "prepared_again_with_another_option": ("K8e", "a second prepare() with another option"),
    "schedule_free": ("K17b", "ScheduleFreeAdamW (plain Keras on TensorFlow: right only if built before fit)"),
    "a_restored_fit_is_one_training_for_callbacks": None,
    "fits_by_a_method_without_verbose": None,
    "bar_of_rank_0": ("K8f", "the progress bar of fit"),
}
REFUSED = {
    "fit_with_y": ("ConfigError", "cannot take these arguments", "fit(y=)", "loader((x, y"),
    "fit_with_sample_weight": ("ConfigError", "cannot take these arguments", "fit(sample_weight=)", "loader((x, y"),
    "fit_with_class_weight": ("ConfigError", "cannot take these arguments", "fit(class_weight=)", "loader((x, y"),
    "fit_with_steps": ("ConfigError", "fit(steps_per_epoch=)", "fix: remove steps_per_epoch=; a part of endless data"),
    "fit_with_batch_size": ("ConfigError", "fit(batch_size=)", "fix: remove batch_size=; the batch of a rank is"),
    "both_kinds_of_weights": ("ConfigError", "class_weight=", "class_weight= and sample weights", "multiply"),
    "classes_in_text": ("ConfigError", "class_weight={'0': 2.0}", "int(label)"),
    "rate_by_the_logs_of_a_batch": ("ReplicaError", "equal at the end of an epoch", "logs of a batch"),
    "stateful": ("ConfigError", "stateful=True: lstm", "remove stateful="),
    "another_loss": ("ReplicaError", "the same compile.loss", 'rank 0: "mse"', 'rank 1: "mae"'),
    "other_loss_weights": ("ReplicaError", "the same compile.loss_weights", "rank 1: [1.0, 2.0]"),
    "sparse_tensors": ("ConfigError", "sparse tensors", "tf.sparse.to_dense"),
    "single_samples": ("ConfigError", "must come in batches", "dataset.batch("),
    "repeated_without_end": ("ConfigError", "must end", "remove .repeat()"),
    "shuffled_by_tensorflow": ("ConfigError", "the tf.data set must give the same", "lambda epoch: dataset.shuffle"),
}
ROWS = {
    "fit_with_y": ("K5c", "fit(loader(...), y=)"),
    "fit_with_class_weight": ("K5d", "fit(loader(...), class_weight=)"),
    "fit_with_sample_weight": ("K5e", "fit(loader(...), sample_weight=)"),
    "fit_with_steps": ("K8b", "fit(loader(...), steps_per_epoch=)"),
    "another_loss": ("K27a", "ranks compiled with other losses"),
    "other_loss_weights": ("K27b", "ranks compiled with other loss_weights"),
    "sparse_tensors": ("K27c", "a `tf.data` set of SparseTensors"),
    "single_samples": ("K27d", "a `tf.data` set without batches"),
    "repeated_without_end": ("K27e", "a `tf.data` set with `.repeat()`"),
    "shuffled_by_tensorflow": ("K27f", "a `tf.data` set that shuffles as it likes (image_dataset_from_directory)"),
}
MENDED = {
    "a_loss_that_is_next_to_nothing": "it trains on",
    "counts_every_step_of_an_execution": "compared after every second step",
    "prepared_again_with_another_option": "the step is traced anew",
    "bar_of_rank_0": "one bar, rank 0's",
}


ON_TENSORFLOW = {  # of its graphs
    "validates_with_a_tail", "parts_that_a_step_of_ones_own_calls", "counts_every_step_of_an_execution",
    "prepared_again_with_another_option",
}  # fmt: skip


@each(ACCEPTED, ON_TENSORFLOW)
def test_fits_are_those_of_plain_keras(case: str, backend: str, ran: Ran, limit: Limit) -> None:
    passed(ran(backend), case)
    row = ACCEPTED[case]
    if row is None:
        return
    if case in MENDED:
        limit(*row, mended=MENDED[case])
    else:
        limit(*row, exact=float(ran(backend)[0][case].split()[1]))


@each(REFUSED)
def test_what_would_be_wrong_is_refused_by_all(case: str, backend: str, ran: Ran, limit: Limit) -> None:
    refused(ran(backend), case, *REFUSED[case])
    if case in ROWS:
        limit(*ROWS[case], refused=ran(backend)[0][case])
