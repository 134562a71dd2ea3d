"""Evaluation on all ranks together: every sample exactly once."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.core.sharding import check_evaluation
from hvdtrain.core.world import World, given_or_current
from hvdtrain.keras import averaging, metric_states
from hvdtrain.keras.checks import replicas
from hvdtrain.keras.data.create import comes_in_batches, loader
from hvdtrain.keras.data.loader import Loader
from hvdtrain.keras.data.walked import open_ended
from hvdtrain.keras.session import KEY, Session


def evaluate(
    model: keras.Model, data: Any, *, per_rank_batch: int | None = None, world: World | None = None
) -> dict[str, float]:
    """Evaluates on all ranks together, every sample exactly once; collective.

    Args:
        model: compiled; equal on all ranks (they are, after `fit` with our callbacks).
        data: the same on every rank: what `loader` takes, or a `Loader`.
        per_rank_batch: samples a rank takes at a time; not needed with a `Loader`, and data that comes in batches.
        world: the ranks; by default those of `hvdtrain.init`.

    Returns:
        Loss and metrics of all samples, the same numbers on every rank.

    Raises:
        ConfigError: arrays of different lengths, data of another kind, or no batch size.
        ReplicaError: replicas, data or sets of metrics that differ.
    """
    world = given_or_current(world, "keras")
    if not isinstance(data, Loader):
        if not comes_in_batches(data):
            check_evaluation(data, per_rank_batch)
        data = loader(data, per_rank_batch, world=world, shuffle=False)
    else:
        check_evaluation(data, per_rank_batch)
    data = data.apart()
    with open_ended():
        if world.size == 1:
            return dict(model.evaluate(data, verbose=0, return_dict=True))
        replicas.check_equal(model.trainable_weights, world, when="when they are evaluated")
        vars(model).setdefault(KEY, Session(world))
        averaging.hook_test_step(model)
        with averaging.together(model, even=True):
            model.evaluate(data, verbose=0, return_dict=True)
        mine = data.mine()
        if mine is None:
            mine = metric_states.seen(model)[1]
        return metric_states.results(model, metric_states.states(model), world, mine)
