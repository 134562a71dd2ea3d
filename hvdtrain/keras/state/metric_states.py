"""Metrics over all ranks: the *states* of the metrics are summed, and the result is computed from the sums.

So each sample counts once, whatever the shares, and metrics that are not means (AUC, precision, RMSE) are
also right. A metric's variables with Keras' default aggregation are summed; a metric that declares `mean` is
averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np

from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.backends.session import map_leaves
from hvdtrain.keras.state import reduce
from hvdtrain.world.world import World

States = list[tuple[Any, np.ndarray]]


def states(model: keras.Model) -> States:
    """Returns the metric variables of a model with this rank's values; local."""
    return [(v, BACKEND.to_numpy(v).copy()) for metric in model.metrics for v in metric.variables]


def add(model: keras.Model, earlier: Sequence[np.ndarray]) -> None:
    """Adds what this rank's metrics held when their epoch was saved; a model with other metrics keeps its own."""
    now = states(model)
    if [array.shape for _, array in now] == [array.shape for array in earlier]:
        summed = [(v, array + before) for (v, array), before in zip(now, earlier, strict=True) if not _is_mean(v)]
        _assign(summed)


def _is_mean(variable: Any) -> bool:
    return bool(getattr(variable, "aggregation", "sum") == "mean")


def computed(model: keras.Model) -> dict[str, np.ndarray]:
    """Returns the metrics' results from their states; those of a metric that gives a dict by the names in it."""

    def flat(found: dict[str, Any]) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {}
        for name, value in found.items():
            nested = isinstance(value, dict)
            arrays |= flat(value) if nested else {name: np.asarray(keras.ops.convert_to_numpy(value))}
        return arrays

    return flat(model.get_metrics_result())


def named(
    model: keras.Model,
    step: Callable[[], Any],
    own: Mapping[int, tuple[Any, Any]],
    metric_of: MutableMapping[str, str | None],
    prefix: str = "",
) -> Any:
    """Runs a step, and notes in `metric_of` which metric's result each of its logs is, by their names.

    A step may return a result under another name, and a number of its own under the name of a metric.
    """
    with _observed(model, own) as (metrics, results):
        logs = step()
    returned = logs.items() if isinstance(logs, dict) else ()
    found = {key: results[id(value)][0] for key, value in returned if id(value) in results}
    within = {name for _, value in results.values() if isinstance(value, dict) for name in value}
    late = {metric.name for metric in model.metrics if metric not in metrics}  # made in this step
    metric_of.update({prefix + key: prefix + name for key, name in found.items()})
    metric_of.update({prefix + key: None for key, _ in returned if key not in {*found, *within, *late}})
    return logs


@contextmanager
def _observed(
    model: keras.Model, own: Mapping[int, tuple[Any, Any]]
) -> Iterator[tuple[list[Any], dict[int, tuple[str, Any]]]]:
    """Notes the results of a model's metrics while open: by their ids, the metric's name and the result.

    A metric that is given what `whole` joined, and that alone, gets this rank's own rows of it.
    """
    results: dict[int, tuple[str, Any]] = {}

    def note(metric: Any, *args: Any) -> Any:
        value = type(metric).result(metric, *args)
        results[id(value)] = metric.name, value
        return value

    def update(metric: Any, *args: Any, **kwargs: Any) -> Any:
        if all(leaf is None or id(leaf) in own for leaf in keras.tree.flatten((args, kwargs))):
            args, kwargs = map_leaves(lambda leaf: own[id(leaf)][0], (args, kwargs))
        return type(metric).update_state(metric, *args, **kwargs)

    metrics = [metric for metric in model.metrics if not {"result", "update_state"} & set(vars(metric))]
    for metric in metrics:
        vars(metric).update(result=partial(note, metric), update_state=partial(update, metric))
    try:
        yield metrics, results
    finally:
        for metric in metrics:
            del vars(metric)["result"], vars(metric)["update_state"]


def by_log(results: Mapping[str, float], metric_of: Mapping[str, str | None]) -> dict[str, float]:
    """Returns metrics' results by the names that logs have for them (`named`); without what is no result."""
    renamed = {log: results[name] for log, name in metric_of.items() if name is not None and name in results}
    return renamed | {name: value for name, value in results.items() if name not in metric_of}


def same(local: States, world: World) -> bool:
    """Returns True if all ranks have the same states: they evaluated the same samples; collective."""
    if not local:
        return False
    flat = np.concatenate([np.asarray(a, np.float64).reshape(-1) for _, a in local])
    world.agree("set of metrics", flat.size)
    ends = reduce.on_host(np.concatenate([flat, -flat]), "min", world, "comparison of metrics")
    low, high = ends[: flat.size], -ends[flat.size :]
    return bool(high.any() and np.allclose(low, high, rtol=1e-6, atol=0))


def results(model: keras.Model, local: States, world: World, samples: float, *, same: bool = False) -> dict[str, float]:
    """Returns the metrics of all ranks' samples together; collective. This rank's states stay what they are.

    Args:
        samples: the weight of states that are averaged, all alike if no rank knows it.
        same: all ranks evaluated the same samples, which count once.
    """
    total = _sum(local, world, samples, all_means=same)
    keep = states(model)
    try:
        _assign(total)
        return {name: array if array.ndim else float(array) for name, array in computed(model).items()}  # type: ignore[misc]
    finally:
        _assign(keep)


def _sum(local: States, world: World, samples: float, *, all_means: bool) -> States:
    if not local:
        return []
    means = [all_means or _is_mean(v) for v, _ in local]
    known = any(means) and reduce.summed([np.array(samples)], world, "samples of metrics")[0] > 0
    samples = float(samples) if known else 1.0
    weighted = [
        np.asarray(a, np.float64) * (samples if m else 1.0) if samples or not m else np.zeros(a.shape)
        for (_, a), m in zip(local, means, strict=True)
    ]
    world.agree("set of metrics", [(tuple(a.shape), m) for a, m in zip(weighted, means, strict=True)])
    *sums, all_samples = reduce.summed([*weighted, np.array(samples)], world, "sum of metrics")
    out = []
    for (variable, value), part, mean in zip(local, sums, means, strict=True):
        part = part / max(all_samples, 1e-300) if mean else part
        out.append((variable, part.astype(value.dtype)))
    return out


def _assign(values: States) -> None:
    for variable, value in values:
        variable.assign(value)


def seen(model: keras.Model) -> tuple[float, float]:
    """Returns the loss summed over this rank's samples, and their number, since its reset; 0 if it is not used."""
    tracker: Any = getattr(model, "_loss_tracker", None)
    if getattr(tracker, "count", None) is None:
        return 0.0, 0.0
    return float(BACKEND.to_numpy(tracker.total)), float(BACKEND.to_numpy(tracker.count))
