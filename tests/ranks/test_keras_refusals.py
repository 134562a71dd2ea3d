"""What would train silently wrong is refused by every rank, with the rule, what came per rank, and what to do."""

from __future__ import annotations

from harness import PROGRAMS
from keras_cases import Ran, each, passed, refused

PROGRAM = PROGRAMS / "keras" / "catches.py"
# case -> kind and parts of each rank's error
REFUSED = {
    "unwrapped_fit": ("ReplicaError", "must be averaged over ranks", "prepare(model)"),
    "recompiled": ("ReplicaError", "another compile()", "prepare(model)"),
    "cloned_optimizer": ("ReplicaError", "from_config", "prepare(model)"),
    "forgotten_broadcast": ("ReplicaError", "replicas must be equal", "conv2d/kernel", "rank 0: sum", "rank 1: sum",
        "callbacks(model)"),
    "unequal_rate": ("ReplicaError", "learning_rate", "rank 0: 0.1", "rank 1: 0.2", "hvdtrain.LR"),
    "unequal_model": ("ReplicaError", "same model", "(36, 4)", "(36, 5)"),
    "unhooked_on_one_rank": ("ReplicaError", "averaging hook", "rank 0: True", "rank 1: False"),
    "averaged_then_changed": ("ReplicaError", "mean of all ranks' gradients", "rank 0: off by", "rank 1: off by"),
    "summed": ("ReplicaError", "mean of all ranks' gradients", "off by"),
    "steps_differ": ("ReplicaError", "same number of steps", "'steps per epoch': 2", "'steps per epoch': 3",
        "loader("),
    "watch_catches": ("ReplicaError", "after step 4", "1 of 14 variables", "first sequential/", "kernel", "element 5"),
    "optimizer_inside_loss_scale": ("ReplicaError", "outermost optimizer must average", "prepare(model)"),
    "accumulation_inside_multi": ("ConfigError", "MultiOptimizer", "gradient_accumulation_steps=2"),
    "scaled_twice": ("ConfigError", "scaled twice"),
    "two_schedules": ("ConfigError", "the learning rate cannot be set elsewhere", "ExponentialDecay"),
    "rate_without_batch": ("ConfigError", "per_rank_batch"),
    "callbacks_made_after_fit_is_looked_up": ("ConfigError", "of a model that was not prepared before",
        "callbacks=ours"),
    "callbacks_of_one_rank": ("ConfigError", "on every rank", "rank 0: with them", "rank 1: without them"),
    "batch_said_twice": ("ConfigError", "batch size must be set once", "per_rank_batch=8", "remove per_rank_batch="),
    "prepared_with_arrays": ("ConfigError", "a loader of hvdtrain.keras.loader", "a tuple"),
    "data_in_a_list": ("ConfigError", "a list of 2", "(x, y) instead of [x, y]"),
    "world_of_torch": ("ConfigError", 'needs hvdtrain.init("keras")', 'received: a world of "torch"'),
    "not_compiled": ("ConfigError", "compile"),
    "unknown_compression": ("ConfigError", "'int3'"),
    "stock": ("ReplicaError", "Horovod's own Keras wrapper"),
    "evaluates_replicas_that_differ": ("ReplicaError", "when they are evaluated", "rank 1: sum",
        "fix: hvdtrain.keras.prepare(model, data), before"),
    "learning_rate_of_a_number": ("ConfigError", "does not take learning_rate=", "fix: lr=hvdtrain.LR(base=0.1"),
}  # fmt: skip
ACCEPTED = {
    "right": "", "restored_after_training": "", "other_data_order": "", "rate_follows_samples": "",
    "optimizer_inside_loss_scale_with_callbacks": "",
    # all ranks skip the step, and halve the same scale
    "inf_on_one_rank": "scale 16384 updates 3 finite True equal True",
    "inf_while_accumulating": "scale 16384 updates 1 finite True equal True",
}  # fmt: skip


@each(REFUSED)
def test_every_rank_refuses(case: str, backend: str, ran: Ran) -> None:
    refused(ran(backend), case, *REFUSED[case])


@each(ACCEPTED)
def test_what_is_right_passes(case: str, backend: str, ran: Ran) -> None:
    passed(ran(backend), case, ACCEPTED[case])
