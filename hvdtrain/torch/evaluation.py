"""Evaluation on all ranks together: every sample exactly once, whatever their number."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvdtrain.core.errors import ConfigError, ReplicaError
from hvdtrain.core.sharding import Step, check_evaluation
from hvdtrain.core.world import World, fsum, given_or_current
from hvdtrain.torch.clock import CLOCK
from hvdtrain.torch.data.create import loader
from hvdtrain.torch.data.loader import Loader
from hvdtrain.torch.data.nested import map_tensors, to_device
from hvdtrain.torch.data.source import Augment
from hvdtrain.torch.engines.buffers import synchronize
from hvdtrain.torch.engines.shell import unwrap
from hvdtrain.torch.gathered import gather_in_order

# (outputs, targets) -> {name: [n], one value a sample; or a pair, values and weights}
Metrics = Callable[[Any, Any], Mapping[str, Any]]
_VERBS = ("update", "compute", "reset")


def evaluate(
    model: nn.Module,
    data: Any,
    metrics: Any,
    *,
    forward: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None,
    per_rank_batch: int | None = None,
    world: World | None = None,
    workers: int | Literal["auto"] = "auto",
    augment: Augment | None = None,
) -> dict[str, float]:
    """Returns metrics over all samples, each counted once, the same numbers on every rank; collective.

    Replicas' buffers are made equal first. The model is in evaluation mode while it runs, and afterwards each of its
    parts in the mode it was in.

    Args:
        model: called with all parts of a batch but the last, which are its targets; with a dict's values by name, as
            models of transformers take them (the targets are then the dict itself).
        data: the same on every rank: what `loader` takes, or a `Loader`.
        metrics: a function of (outputs, targets), for example `classification()`, that returns {name: [n], one value
            a sample} and whose means are taken, or pairs (values, weights) of any shape (of tokens, say); objects with
            `update(outputs, targets)`, `compute()` and `reset()`, as torchmetrics has them, one, a collection or by
            name, whose states are joined; `corpus_metrics(function)` for what needs all predictions at once; or a
            list of these.
        forward: called with model and batch, returns outputs and targets.
        per_rank_batch: samples a rank takes at a time; not needed with a `Loader`.
        world: the ranks; by default those of `hvdtrain.init`.
        workers: as of `loader`.
        augment: as of `loader`; here for what turns samples into inputs (`normalise`).

    Raises:
        ConfigError: no samples, batches without targets, or metrics that are none of the above.
        ReplicaError: on every rank, when ranks report different metrics.
    """
    world = given_or_current(world, "torch")
    with one_pass(model, data, per_rank_batch, world, workers, augment) as batches:
        kept = _kept(metrics, batches.device)
        for batch, step in batches.one_pass():
            outputs, targets = (forward or _forward)(model, batch)
            for one in kept:
                one.add(step, outputs, targets)
        return _merged([one.results(world) for one in kept])


@contextmanager
def one_pass(
    model: nn.Module,
    data: Any,
    per_rank_batch: int | None,
    world: World,
    workers: int | Literal["auto"],
    augment: Augment | None,
) -> Iterator[Loader]:
    """The data as a `Loader`, and the same model on every rank, evaluating, without gradients; collective.

    Raises:
        ConfigError: a data set without `per_rank_batch`, or a `Loader` with one.
    """
    before = CLOCK.enter("evaluation")
    batches = data if isinstance(data, Loader) else None
    try:
        check_evaluation(data, per_rank_batch)
        if batches is None:
            assert per_rank_batch is not None  # checked
            batches = loader(data, per_rank_batch, world=world, shuffle=False, workers=workers, augment=augment)
        synchronize(model, world)
        with evaluating(model):
            yield batches
    finally:
        if batches is not None and batches is not data:
            batches.close()
        CLOCK.enter(before)


def _forward(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Returns outputs and targets of a batch."""
    if isinstance(batch, Mapping):
        return model(**batch), batch
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise ConfigError(
            "a batch for evaluation is (inputs ..., targets), or a dict of the model's arguments",
            f"a {type(batch).__name__}" + (f" of {len(batch)}" if hasattr(batch, "__len__") else ""),
            "give arrays (x, y), a data set (or collate) that returns such tuples or dicts, or"
            " forward=lambda model, batch: (outputs, targets)",
        )
    return model(*batch[:-1]), batch[-1]


def _merged(results: list[dict[str, float]]) -> dict[str, float]:
    names = [name for its in results for name in its]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            "each metric has a name of its own",
            f"{', '.join(twice)} twice",
            "name them: {name: metric} for objects, other keys in what functions return",
            shared=True,
        )
    return {name: value for its in results for name, value in its.items()}


def _no_samples() -> ConfigError:
    return ConfigError("evaluation needs samples", "no sample could be read, or there is none", shared=True)


class _Kept(Protocol):
    """What is kept of all batches for some metrics, and made of it in the end."""

    def add(self, step: Step, outputs: Any, targets: Any) -> None: ...

    def results(self, world: World) -> dict[str, float]:
        """The metrics over all ranks; collective."""


def _kept(metrics: Any, device: torch.device) -> list[_Kept]:
    """Returns what keeps each of the metrics.

    Raises:
        ConfigError: none of the kinds of `evaluate`.
    """
    if isinstance(metrics, (list, tuple)):
        return [kept for part in metrics for kept in _kept(part, device)]
    if isinstance(metrics, Corpus):
        return [_Predictions(metrics)]
    named = metrics if isinstance(metrics, Mapping) else {"": metrics}
    if named and all(_has_verbs(metric) for metric in named.values()):
        return [_States(name, metric, device) for name, metric in named.items()]
    if callable(metrics) and not isinstance(metrics, type):
        return [_Means(metrics)]
    raise ConfigError(
        "metrics are a function (outputs, targets), objects with update(), compute() and reset() (torchmetrics), or"
        " hvt.corpus_metrics(function)",
        f"the class {metrics.__name__}" if isinstance(metrics, type) else f"a {type(metrics).__name__}",
        'lambda outputs, targets: {"accuracy": outputs.argmax(1) == targets}',
    )


def _has_verbs(metric: Any) -> bool:
    return not isinstance(metric, type) and all(callable(getattr(metric, verb, None)) for verb in _VERBS)


class _Means:
    """Sums of a function's values and of their weights, in float64."""

    def __init__(self, function: Metrics) -> None:
        self.function = function
        self.totals: dict[str, Tensor] = {}
        self.empty = True

    def add(self, step: Step, outputs: Any, targets: Any) -> None:
        values = self.function(outputs, targets)
        if not isinstance(values, Mapping):
            raise ConfigError(
                "metrics return values by name, {name: one value a sample}",
                f"a {type(values).__name__}",
                'lambda outputs, targets: {"accuracy": outputs.argmax(1) == targets}',
            )
        for name, value in values.items():
            total = _sum_and_weight(name, value, step.samples)
            self.totals[name] = self.totals[name] + total if name in self.totals else total
        self.empty = False

    def results(self, world: World) -> dict[str, float]:
        """A rank that had no samples knows no names, and agrees to those of the others."""
        reports = world.gather(None if self.empty else {name: total.tolist() for name, total in self.totals.items()})
        known = [sums for sums in reports if sums is not None]
        if not known:
            raise _no_samples()
        if any(list(other) != list(known[0]) for other in known[1:]):
            raise ReplicaError(
                "every rank must report the same metrics", "\n".join(", ".join(other) for other in known), shared=True
            )
        of_all = {name: [fsum([sums[name][part] for sums in known]) for part in (0, 1)] for name in known[0]}
        return {name: total / weight if weight else math.nan for name, (total, weight) in of_all.items()}


def _sum_and_weight(name: str, value: Any, samples: int) -> Tensor:
    """Returns [sum, weight], in float64."""
    weighted = isinstance(value, (tuple, list)) and len(value) == 2
    values, weights = value if weighted else (value, None)
    if not isinstance(values, Tensor) or (not weighted and values.shape != (samples,)):
        received = tuple(values.shape) if isinstance(values, Tensor) else type(value).__name__
        raise ConfigError(
            "a metric is a tensor with one value a sample, or a pair (values, weights)",
            f"{name}: {received} for {samples} samples",
            'without a mean: reduction="none", or (outputs.argmax(1) == targets); of tokens (losses, labels != -100)',
        )
    values = values.detach().to(torch.float64)
    if not weighted:
        return torch.stack([values.sum(), values.new_tensor(samples)])
    if not isinstance(weights, Tensor) or weights.shape != values.shape:
        received = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ConfigError("each value of a metric has a weight", f"{name}: {tuple(values.shape)} and {received}")
    weights = weights.to(values)
    return torch.stack([torch.where(weights == 0, 0.0, values * weights).sum(), weights.sum()])


class _States:
    """A metric object with states that can be joined, as torchmetrics has them: `add_state(name, default,
    dist_reduce_fx)` notes in `_reductions` how. The user's stays as it is: a copy is fed.
    """

    def __init__(self, name: str, metric: Any, device: torch.device) -> None:
        self.name, self.metric = name, copy.deepcopy(metric)
        if hasattr(self.metric, "to"):
            self.metric = self.metric.to(device)
        self.metric.reset()
        self.empty = True
        self.device = device
        self.replayed: list[tuple[int, Any, Any]] | None = [] if _one_process_only(self.metric) else None

    def add(self, step: Step, outputs: Any, targets: Any) -> None:
        if self.replayed is not None:
            self.replayed.append((step.first, *map_tensors(Tensor.cpu, (outputs, targets))))
        else:
            self.metric.update(outputs, targets)
        self.empty = False

    def results(self, world: World) -> dict[str, float]:
        if self.empty and world.size == 1:
            raise _no_samples()
        if self.replayed is not None:
            batches = sorted(
                (batch for its in world.gather(self.replayed) for batch in its), key=lambda batch: batch[0]
            )
            if not batches:
                raise _no_samples()
            for _, outputs, targets in batches:
                self.metric.update(to_device(outputs, self.device), to_device(targets, self.device))
        collection = hasattr(self.metric, "items")  # of torchmetrics; it puts shared states into each of its metrics
        named = dict(self.metric.items()) if collection else {self.name or type(self.metric).__name__: self.metric}
        found: dict[str, float] = {}
        for name, metric in named.items():
            if world.size > 1 and self.replayed is None:
                _join_states(name, metric, world, empty=self.empty)
            for part in _within(metric):
                part._to_sync, part._computed = False, None  # torch.distributed has nothing to add
                part._update_count = getattr(part, "_update_count", 0) or 1  # a rank without samples knows all states
            value = metric.compute()
            found |= _numbers("" if isinstance(value, Mapping) and not self.name else name, value)
        return found


def _join_states(name: str, metric: Any, world: World, *, empty: bool) -> None:
    """Makes a metric's states, and those of metrics within it, those of all ranks' samples; collective."""
    if any(type(part).__name__ == "Running" for part in _within(metric)):
        raise ConfigError(
            "a metric of all samples does not depend on how they come in batches",
            f"{name}: the last batches alone (torchmetrics' Running), which each rank has others of",
            "the metric itself, without Running",
            shared=True,
        )
    parts = [part for part in _within(metric) if getattr(part, "_reductions", None)]
    if not parts:
        raise ConfigError(
            "the states of a metric are joined over ranks as its add_state(..., dist_reduce_fx=) says",
            f"{name}: {type(metric).__name__} has none",
            "a metric of torchmetrics; or hvt.corpus_metrics(function), which is given all outputs and targets",
            shared=True,
        )
    own = [{state: map_tensors(Tensor.cpu, getattr(part, state)) for state in part._reductions} for part in parts]
    reports = [states for states in world.gather(None if empty else own) if states is not None]
    if not reports:
        raise _no_samples()
    for index, part in enumerate(parts):
        for state, reduction in part._reductions.items():
            of_ranks = [states[index][state] for states in reports]
            default = getattr(part, state)
            device = default.device if isinstance(default, Tensor) else getattr(part, "device", "cpu")
            setattr(part, state, to_device(_reduced(name, of_ranks, reduction), torch.device(device)))


def _within(metric: Any) -> list[Any]:
    return list(metric.modules()) if isinstance(metric, nn.Module) else [metric]


def _one_process_only(metric: Any) -> bool:
    """Whether it has a tensor that nothing joins (dist_reduce_fx=None): compute() may not take one of each rank stacked
    (NormalizedRootMeanSquaredError), or loses what ranks of one sample have (PearsonCorrCoef). It is fed all batches.
    """
    parts = _within(metric)
    return not any(type(part).__name__ == "Running" for part in parts) and any(
        reduction is None and isinstance(getattr(part, state), Tensor)
        for part in parts
        for state, reduction in (getattr(part, "_reductions", None) or {}).items()
    )


def _reduced(name: str, of_ranks: list[Any], reduction: Any) -> Any:
    """One state of all ranks, as torchmetrics joins it: tensors are stacked, lists put together, then reduced; but
    tensors that are to be one behind the other are not stacked, so that they are what one process has."""
    kind = getattr(reduction, "__name__", "")
    if "mean" in kind:
        first = of_ranks[0]
        if isinstance(first, Tensor) and all(first.equal(other) for other in of_ranks):  # a constant, like a data range
            return first
        raise ConfigError(
            "the states of a metric add up, whatever the ranks' samples",
            f'{name} has one with dist_reduce_fx="mean": a mean over ranks',
            "keep a sum and a count; or hvt.corpus_metrics(function), which is given all outputs and targets",
            shared=True,
        )
    lists = isinstance(of_ranks[0], list)
    if not lists and "cat" in kind and of_ranks[0].ndim:
        return torch.cat(of_ranks)
    if not lists and len({state.shape for state in of_ranks}) > 1:
        raise ConfigError(
            "a metric's state that is a tensor has the same shape on every rank",
            f"{name}: {' and '.join(str(tuple(state.shape)) for state in of_ranks)}",
            'a list to which it appends; or dist_reduce_fx="cat"',
            shared=True,
        )
    joined = [item for items in of_ranks for item in items] if lists else torch.stack(of_ranks)
    return joined if reduction is None or (lists and not joined) else reduction(joined)


def _numbers(name: str, value: Any) -> dict[str, float]:
    """A metric's result as numbers with names: parts of a mapping and elements of a tensor after the metric's."""
    if getattr(value, "ndim", 0):
        value = value.tolist()
    parts = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
    if not isinstance(parts, Mapping):
        return {name: float(value)}
    found = [_numbers(f"{name}_{part}" if name else str(part), its) for part, its in parts.items()]
    return {key: number for numbers in found for key, number in numbers.items()}


@dataclass(frozen=True)
class Corpus:
    """See `corpus_metrics`."""

    function: Callable[[Any, Any], Mapping[str, float]]


def corpus_metrics(function: Callable[[Any, Any], Mapping[str, float]]) -> Corpus:
    """Returns metrics for `evaluate` that need all predictions at once (F1, AUC, BLEU): `function(outputs, targets)`
    is called once, on rank 0, with those of all samples in order, on the CPU, and returns numbers by name.

    Args:
        function: for example `lambda outputs, targets: {"auc": roc_auc_score(targets, outputs)}`.
    """
    return Corpus(function)


class _Predictions:
    """All outputs and targets."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.batches: list[tuple[Step, Any]] = []

    def add(self, step: Step, outputs: Any, targets: Any) -> None:
        self.batches.append((step, map_tensors(Tensor.cpu, (outputs, targets))))

    def results(self, world: World) -> dict[str, float]:
        outputs, targets = gather_in_order(self.batches, world=world)
        return world.on_main(lambda: _numbers("", self.corpus.function(outputs, targets)))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; at the end each module is in the mode it was in (frozen parts differ)."""
    modes = [(module, module.training) for module in (*model.modules(), unwrap(model))]  # a pipeline lacks its root
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def classification(top: tuple[int, ...] = (1, 5), label_smoothing: float = 0.0) -> Metrics:
    """Returns metrics of class scores: "loss" (cross-entropy) and "top1", "top5", ... (1 where the target's score is
    among the k highest).

    Equal scores count in the order of classes, as `argmax` does on most devices; a score that is not a number is
    never right.

    Args:
        top: which k.
        label_smoothing: as of `torch.nn.functional.cross_entropy`.
    """
    if any(isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in top):
        raise ConfigError("top holds whole numbers >= 1", f"top={top!r}")

    def measure(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        _check_classes(outputs, targets)
        scores = outputs.detach()
        scores = scores if scores.dtype == torch.float64 else scores.float()
        own = scores.gather(1, targets[:, None])
        before = torch.arange(scores.shape[1], device=scores.device) < targets[:, None]
        place = (~(scores <= own) | ((scores == own) & before)).sum(1)
        loss = F.cross_entropy(scores, targets, reduction="none", label_smoothing=label_smoothing)
        return {"loss": loss} | {f"top{k}": (place < k) for k in top}

    return measure


def _check_classes(outputs: Any, targets: Any) -> None:
    """That there is one class a sample, and a score for it; on a GPU, which nothing waits for, not the latter."""
    received = [
        f"{name} {tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else f"{name}: {type(value).__name__}"
        for name, value in (("scores", outputs), ("targets", targets))
    ]
    tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    whole = tensors and not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)
    if not whole or outputs.shape[:1] != targets.shape or outputs.dim() != 2:
        raise ConfigError(
            "classification() takes scores [n, classes] and targets [n], one class a sample",
            ", ".join(received),
            "targets.argmax(1) of probabilities, targets.squeeze(1) of [n, 1], targets.long() of other numbers; for"
            " anything else metrics of your own",
        )
    if targets.device.type != "cpu" or not len(targets):
        return
    least, most = int(targets.min()), int(targets.max())
    if least < 0 or most >= outputs.shape[1]:
        raise ConfigError(
            "each target is a class that has a score",
            f"targets from {least} to {most}, scores of {outputs.shape[1]} classes",
            "leave samples that do not count (-100) out of the data; or give metrics of your own",
        )
