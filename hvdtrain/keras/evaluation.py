"""Evaluation and prediction on all ranks together: every sample exactly once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np

from hvdtrain.comm.elastic import repeated
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.keywords import refuses_other_keywords
from hvdtrain.core.sharding import check_evaluation
from hvdtrain.keras import averaging
from hvdtrain.keras.backends.engine import world_of
from hvdtrain.keras.backends.session import KEY, KerasSession, Prepared, hook, session_of
from hvdtrain.keras.data.create import comes_in_batches, loader
from hvdtrain.keras.data.loader import KerasLoader
from hvdtrain.keras.data.streams import open_ended
from hvdtrain.keras.state import metric_states, replicas
from hvdtrain.world.world import World


@refuses_other_keywords(batch_size="per_rank_batch=, the samples that each rank takes at a time")
@repeated
def evaluate(
    model: keras.Model, data: Any, *, per_rank_batch: int | None = None, world: World | None = None
) -> dict[str, float]:
    """Returns loss and metrics over all samples, each counted once, the same numbers on every rank; collective.

    Example:
        scores = hvk.evaluate(model, (x_test, y_test), per_rank_batch=100)
        print(scores["loss"], scores["accuracy"])

    Args:
        model: compiled; equal on all ranks, as after `fit` with our callbacks.
        data: the same on every rank: what `loader` takes, or a `KerasLoader`.
        per_rank_batch: samples of a rank per step; not needed with a `KerasLoader` or data in batches.
        world: the ranks; default: those of `hvdtrain.init`.

    Raises:
        ConfigError: arrays of different lengths, data of another kind, or no batch size.
        ReplicaError: replicas, data or sets of metrics differ.
    """
    world = world_of(world)
    data = _loader_of(data, per_rank_batch, world)
    with open_ended():
        if world.size == 1:
            averaging.hook_own_steps(model)
            return dict(type(model).evaluate(model, data, verbose=0, return_dict=True))
        replicas.check_equal(model.trainable_weights, world, when="when they are evaluated", model=model)
        session = session_of(model) or KerasSession(Prepared(world))
        vars(model)[KEY] = session
        averaging.hook_test_step(model)
        with averaging.together(model, even=True):
            logs = dict(type(model).evaluate(model, data, verbose=0, return_dict=True))  # past `hook_reads`
        mine = data.mine()
        if mine is None:
            mine = metric_states.seen(model)[1]
        results = metric_states.results(model, metric_states.states(model), world, mine)
        results = {f"val_{name}": value for name, value in results.items()}
        known = metric_states.by_log(results, session.proofs.metric_of)
        found = {log: known[f"val_{log}"] for log in logs if f"val_{log}" in known}
        own = {log: float(value) for log, value in logs.items() if log not in found}
        if own:  # what a step of the user's returns beside the metrics: Keras gives that of the last batch
            found.update(world.mean(own, weight=data.last_rows))
        return {log: found[log] for log in logs}


@refuses_other_keywords(batch_size="per_rank_batch=, the samples that each rank takes at a time")
def predict(
    model: keras.Model,
    data: Any,
    *,
    per_rank_batch: int | None = None,
    world: World | None = None,
    on_main: bool = False,
) -> Any:
    """Returns the outputs of `model.predict` for all samples, in the data's order; collective.

    Example:
        outputs = hvk.predict(model, x_test, per_rank_batch=100)

    Args:
        model: equal on all ranks, as after `fit` with our callbacks.
        data: the same on every rank: what `loader` takes (`x` alone is enough; several inputs as `model.predict` takes
            them), or a `KerasLoader`.
        per_rank_batch: samples of a rank per step; not needed with a `KerasLoader` or data in batches.
        world: the ranks; default: those of `hvdtrain.init`.
        on_main: True returns None on ranks other than 0.

    Returns:
        Numpy arrays with all samples along axis 0, nested as the model's outputs.

    Raises:
        ConfigError: arrays of different lengths, data of another kind, no batch size, or outputs without a row for each
            sample.
        ReplicaError: replicas or data differ.
    """
    world = world_of(world)
    inputs = getattr(model, "inputs", None) or []
    if isinstance(data, (tuple, list)) and len(data) == len(inputs) > 1 and all(hasattr(a, "shape") for a in data):
        data = (tuple(data),)  # an array for each input, not (x, y)
    data = _loader_of(data, per_rank_batch, world)
    if world.size > 1:
        replicas.check_equal(model.trainable_weights, world, when="before they predict", model=model)
    outputs, parts = _predicted(model, data, world)
    if on_main and not world.is_main:
        return None
    place = np.argsort(np.concatenate([its for its, _ in parts]), kind="stable")
    whole = [np.concatenate(rows)[place] for rows in zip(*(its for _, its in parts), strict=True)]
    return keras.tree.pack_sequence_as(outputs, whole)


@repeated
def _predicted(model: keras.Model, data: KerasLoader, world: World) -> tuple[Any, list[Any]]:
    """Returns the structure of the outputs, and each rank's: where they belong, and what they are."""
    with open_ended():
        outputs = type(model).predict(model, data, verbose=0)
    order = data.served_order()
    leaves = [np.asarray(leaf) for leaf in keras.tree.flatten(outputs)]
    short = [leaf.shape for leaf in leaves if leaf.ndim == 0 or len(leaf) < len(order)]
    if short:
        raise ConfigError(
            "outputs must have a row for each sample",
            f"shape {short[0]} for {len(order)} samples",
            "return per-sample outputs from the model, batch first",
        )
    parts = world.gather((order, [leaf[: len(order)] for leaf in leaves]))  # without the row that stands for none
    return keras.tree.map_structure(lambda _: 0, outputs), parts


def _loader_of(data: Any, per_rank_batch: int | None, world: World) -> KerasLoader:
    """Returns a loader of the data at its beginning, of the caller's own."""
    if isinstance(data, KerasLoader) or not comes_in_batches(data):
        check_evaluation(data, per_rank_batch)
    if not isinstance(data, KerasLoader):
        data = loader(data, per_rank_batch, world=world, shuffle=False)
    return data.apart()


def hook_reads(model: keras.Model) -> None:
    """Makes `model.evaluate(loader)` and `model.predict(loader)` those of all ranks' samples."""
    hook(model, "evaluate", partial(_of_all, model, evaluate))
    hook(model, "predict", partial(_of_all, model, predict))


def _of_all(
    model: keras.Model,
    of_all: Callable[..., Any],
    original: Callable[..., Any],
    x: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    session = session_of(model)
    validates = kwargs.get("_use_cached_eval_dataset", False)  # Keras' `fit` calls it so
    if validates and session is not None and session.place.elastic is not None:
        return session.place.elastic.evaluate(original, x, *args, **kwargs)
    own = not isinstance(x, KerasLoader) or session is None or session.prepared.world.size == 1
    if own or session is None or session.joint is not None or validates:
        return original(x, *args, **kwargs)
    more = sorted(name for name in ("callbacks", "steps", "sample_weight", "y") if kwargs.get(name) is not None)
    if args or more:
        raise ConfigError(
            f"model.{of_all.__name__}(loader) covers all ranks' samples and cannot take more arguments",
            ", ".join(more) or "more than the loader",
            f"hvdtrain.keras.{of_all.__name__}(model, loader)",
        )
    logs = of_all(model, x, world=session.prepared.world)
    if of_all is predict or kwargs.get("return_dict"):
        return logs
    return model._flatten_metrics_in_order(logs)
