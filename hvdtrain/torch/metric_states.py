"""Metric objects, as torchmetrics has them, over all ranks: their states are joined, or they are fed all batches."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.sharding import Step
from hvdtrain.values.nested import map_tensors, to_device
from hvdtrain.world.world import World

_JOINED = ("dim_zero_sum", "dim_zero_max", "dim_zero_min", "dim_zero_mean")  # torchmetrics.utilities.data


class States:
    """A metric object. The user's stays as it is: a copy is fed. Where all that it keeps are tensors that add up (or
    their largest, or smallest), by what `add_state(name, default, dist_reduce_fx)` notes in `_reductions`, these are
    joined. Any other is fed the batches of all ranks, in the data's order."""

    def __init__(self, name: str, metric: Any, device: torch.device) -> None:
        self.name, self.metric, self.device = name, copy.deepcopy(metric), device
        if hasattr(self.metric, "to"):
            self.metric = self.metric.to(device)
        self.metric.reset()
        self.empty = True
        self.batches: list[tuple[int, Any, Any]] | None = None if _adds_up(self.metric) else []
        self.before = _own_counts(self.metric)

    def add(self, step: Step, outputs: Any, targets: Any) -> None:
        if self.batches is None:
            self.metric.update(outputs, targets)
        else:
            self.batches.append((step.first, *map_tensors(Tensor.cpu, (outputs, targets))))
        self.empty = False

    def results(self, world: World) -> dict[str, float]:
        """Returns the metrics of all ranks' samples; collective."""
        if all(world.gather(self.empty)):
            raise no_samples()
        if world.size > 1 and any(type(part).__name__ == "Running" for part in _within(self.metric)):
            raise ConfigError(
                "a metric must not depend on how samples are batched",
                "torchmetrics' Running, which reads the last batches only: each rank has different ones",
                "use the metric without Running",
                shared=True,
            )
        if self.batches is not None:
            self._feed(self.batches, world)
        collection = hasattr(self.metric, "items")  # of torchmetrics; it puts shared states into each of its metrics
        named = dict(self.metric.items()) if collection else {self.name or type(self.metric).__name__: self.metric}
        found: dict[str, float] = {}
        for name, metric in named.items():
            if world.size > 1 and self.batches is None:
                self._join(name, metric, world)
            for part in _within(metric):
                part._to_sync, part._computed = False, None  # torch.distributed has nothing to add
                part._update_count = getattr(part, "_update_count", 0) or 1  # a rank without samples knows all states
            value = metric.compute()
            found |= numbers_of("" if isinstance(value, Mapping) and not self.name else name, value)
        return found

    def _feed(self, batches: list[tuple[int, Any, Any]], world: World) -> None:
        of_all = [batch for its in world.gather(batches) for batch in its]
        for _, outputs, targets in sorted(of_all, key=lambda batch: batch[0]):
            self.metric.update(to_device(outputs, self.device), to_device(targets, self.device))

    def _join(self, name: str, metric: Any, world: World) -> None:
        """Makes a metric's states, and those of metrics within it, those of all ranks' samples; collective."""
        parts = [part for part in _within(metric) if getattr(part, "_reductions", None)]
        own = [{state: getattr(part, state).cpu() for state in part._reductions} for part in parts]
        changed = [key for key, value in _own_counts(self.metric).items() if self.before.get(key) != value]
        reports = world.gather((None if self.empty else own, changed))
        if any(its for _, its in reports):
            raise ConfigError(
                "a metric cannot count outside its states: hvdtrain cannot combine that over ranks",
                f"{name}: {next(its for _, its in reports if its)[0]} changed in update()",
                "add_state(...) for it; or hvt.corpus_metrics(function), which gets all outputs and targets",
                shared=True,
            )
        known = [states for states, _ in reports if states is not None]
        for index, part in enumerate(parts):
            for state, reduction in part._reductions.items():
                of_ranks = [states[index][state] for states in known]
                setattr(part, state, _reduced(name, of_ranks, reduction).to(getattr(part, state).device))


def no_samples() -> ConfigError:
    return ConfigError("evaluation needs samples", "no sample could be read, or there is none", shared=True)


def _within(metric: Any) -> list[Any]:
    return list(metric.modules()) if isinstance(metric, nn.Module) else [metric]


def _adds_up(metric: Any) -> bool:
    """Returns True if all its states are tensors with a reduction that can be applied to one of each rank."""
    states = [
        (getattr(part, state), reduction)
        for part in _within(metric)
        for state, reduction in (getattr(part, "_reductions", None) or {}).items()
    ]
    return bool(states) and all(
        isinstance(value, Tensor) and getattr(reduction, "__name__", "") in _JOINED for value, reduction in states
    )


def _own_counts(metric: Any) -> dict[str, Any]:
    """Numbers, and lengths of containers, in attributes that are no states; torchmetrics' own begin with "_"."""
    found: dict[str, Any] = {}
    for at, part in enumerate(_within(metric)):
        states = getattr(part, "_reductions", None) or {}
        for name, value in vars(part).items():
            if not name.startswith("_") and name not in states and not isinstance(value, bool):
                if isinstance(value, (int, float)):
                    found[f"{type(part).__name__}.{name} ({at})"] = value
                elif isinstance(value, (list, dict, set)):
                    found[f"{type(part).__name__}.{name} ({at})"] = len(value)
    return found


def _reduced(name: str, of_ranks: list[Tensor], reduction: Any) -> Tensor:
    """Returns a state of all ranks, joined as torchmetrics joins it: stacked, then reduced."""
    first = of_ranks[0]
    if len({state.shape for state in of_ranks}) > 1:
        raise ConfigError(
            "a metric's tensor state must have the same shape on every rank",
            f"{name}: {' and '.join(str(tuple(state.shape)) for state in of_ranks)}",
            'use a list as state, and append to it; or dist_reduce_fx="cat"',
            shared=True,
        )
    if reduction.__name__ == "dim_zero_mean":
        if all(first.equal(other) for other in of_ranks):  # a constant, like a data range
            return first
        raise ConfigError(
            "a metric's state cannot be averaged over ranks: they have different samples",
            f'{name} has a state with dist_reduce_fx="mean"',
            "keep a sum and a count; or hvt.corpus_metrics(function), which gets all outputs and targets",
            shared=True,
        )
    joined: Tensor = reduction(torch.stack(of_ranks))
    return joined


def numbers_of(name: str, value: Any) -> dict[str, float]:
    """A metric's result as numbers with names: parts of a mapping and elements of a tensor after the metric's."""
    if getattr(value, "ndim", 0):
        value = value.tolist()
    parts = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
    if not isinstance(parts, Mapping):
        return {name: float(value)}
    found = [numbers_of(f"{name}_{part}" if name else str(part), its) for part, its in parts.items()]
    return {key: number for numbers in found for key, number in numbers.items()}
