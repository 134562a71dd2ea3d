"""Evaluation and prediction on all ranks together: every sample exactly once, whatever their number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.comm.elastic import repeated
from hvdtrain.core.errors import ConfigError, ReplicaError
from hvdtrain.core.keywords import refuses_other_keywords
from hvdtrain.core.sharding import Step, check_evaluation
from hvdtrain.torch.collectives import gather_in_order, lengths, reordered, wrong_length
from hvdtrain.torch.data.create import loader
from hvdtrain.torch.data.loader import Loader
from hvdtrain.torch.data.source import Augment
from hvdtrain.torch.engines import replicas
from hvdtrain.torch.engines.buffers import synchronize
from hvdtrain.torch.engines.engine import engine_of
from hvdtrain.torch.engines.shell import unwrap
from hvdtrain.torch.engines.sync_batchnorm import converted, sync_batchnorm_mode
from hvdtrain.torch.metric_states import States, no_samples, numbers_of
from hvdtrain.torch.values.clock import CLOCK
from hvdtrain.values.nested import map_tensors, tensors_of
from hvdtrain.values.preserved import kept_modes
from hvdtrain.world.world import World, fsum, given_or_current

# (outputs, targets) -> {name: [n], one value a sample; or a pair, values and weights}
Metrics = Callable[[Any, Any], Mapping[str, Any]]
_VERBS = ("update", "compute", "reset")


@refuses_other_keywords(batch_size="per_rank_batch=, the samples that each rank takes at a time")
@repeated
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

    Makes the replicas' buffers equal first, and runs the model in evaluation mode.

    Example:
        scores = hvt.evaluate(model, validation, hvt.classification(top=(1, 5)), per_rank_batch=100)
        print(scores["loss"], scores["top1"])

    Args:
        model: called with all parts of a batch except the last, which is the targets; or with a dict's values by name,
            as models of transformers take them (the targets are then the dict itself).
        data: the same on every rank: what `loader` takes, or a `Loader`.
        metrics: one of these, or a list of them. A function of (outputs, targets) that returns, by name, one value per
            sample [n], or pairs (values, weights) of any shape (for example of tokens): `classification()`. Objects
            with `update(outputs, targets)`, `compute()` and `reset()`, as in torchmetrics: one, a collection, or by
            name. `corpus_metrics(function)`.
        forward: called with model and batch; returns outputs and targets.
        per_rank_batch: samples of a rank per step; not needed with a `Loader`.
        world: the ranks; default: those of `hvdtrain.init`.
        workers: as of `loader`.
        augment: as of `loader`, for example `normalise`.

    Raises:
        ConfigError: no samples, batches without targets, or metrics of another kind.
        ReplicaError: on every rank, if ranks return different metrics.
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
    """Gives the data as a `Loader`, and the same model on every rank, evaluating, without gradients; collective.
    Raises `ConfigError` for a data set without `per_rank_batch`, or a `Loader` with one."""
    before = CLOCK.enter("evaluation")
    batches = data if isinstance(data, Loader) else None
    try:
        check_evaluation(data, per_rank_batch)
        if batches is None:
            assert per_rank_batch is not None  # checked
            batches = loader(data, per_rank_batch, world=world, shuffle=False, workers=workers, augment=augment)
        replicas.check_equal(unwrap(model), world, "when the model is evaluated")
        synchronize(model, world)
        with evaluating(model):
            yield batches
    finally:
        if batches is not None and batches is not data:
            batches.close()
        CLOCK.enter(before)


@refuses_other_keywords(batch_size="per_rank_batch=, the samples that each rank takes at a time")
@repeated
def predict(
    model: nn.Module,
    data: Any,
    *,
    per_rank_batch: int | None = None,
    world: World | None = None,
    workers: int | Literal["auto"] = "auto",
    augment: Augment | None = None,
    inputs: Callable[[Any], Any] = lambda batch: batch,
    on_main: bool = False,
) -> Any:
    """Returns the model's outputs for all samples, on the CPU, in the data's order; collective.

    Makes the replicas' buffers equal first, and runs the model in evaluation mode, without gradients.

    Example:
        outputs = hvt.predict(model, (x_test, y_test), per_rank_batch=100, inputs=lambda batch: batch[0])

    Args:
        model: called with a batch; with its parts if it is a tuple or list.
        data: the same on every rank: what `loader` takes, or a `Loader`.
        per_rank_batch: samples of a rank per step; not needed with a `Loader`.
        world: the ranks; default: those of `hvdtrain.init`.
        workers: as of `loader`.
        augment: as of `loader`, for example `normalise`.
        inputs: returns the model's input for a batch; for data with targets `lambda batch: batch[0]`.
        on_main: True returns None on ranks other than 0.

    Returns:
        The model's outputs with all samples: tensors and arrays along dimension 0, lists with one item per sample, or
        tuples, dicts, data classes of them.

    Raises:
        ConfigError: no samples, samples that cannot be read, or outputs without a row for each sample.
    """
    world = given_or_current(world, "torch")
    kept: list[tuple[Step, Any]] = []
    problem = ""
    with one_pass(model, data, per_rank_batch, world, workers, augment) as batches:
        for batch, step in batches.one_pass():
            given = inputs(batch)
            outputs = model(*given) if isinstance(given, (tuple, list)) else model(given)
            problem = problem or _problem(outputs, step.samples)
            # a copy: a view would travel with all that it is a view of
            kept.append((step, map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), outputs)))
        unread = batches.all_skipped()
    reports = world.gather((problem, [(step.first, step.indices) for step, _ in kept]))
    problem = next(filter(None, (its_problem for its_problem, _ in reports)), "")
    if problem:
        raise ConfigError(
            "outputs must have one row per sample",
            problem,
            "return outputs [samples, ...] from the model; several outputs (heads) in a tuple or a dict",
            shared=True,
        )
    places = sorted((place for _, its_places in reports for place in its_places), key=lambda place: place[0])
    if unread or not places:
        raise ConfigError(
            "predict() needs samples, and must be able to read all of them",
            f"{len(unread)} cannot be read, the first: {unread[0][0]}" if unread else "no sample",
            "remove them from the data" if unread else "give data",
            shared=True,
        )
    found = gather_in_order(kept, world=world)
    order = np.argsort(np.concatenate([samples for _, samples in places]), kind="stable")
    return reordered(found, order) if world.is_main or not on_main else None


def _problem(outputs: Any, samples: int) -> str:
    """Returns what is wrong with a batch's outputs; "" if nothing is."""
    single = any(not part.ndim for part in tensors_of(outputs))
    wrong = wrong_length(outputs, samples)
    if wrong or (not single and any(lengths(outputs))):
        return wrong
    return f"{'one number' if single else f'a {type(outputs).__name__} without values'}, for {samples} samples"


@repeated
def update_bn(data: Any, model: nn.Module, *, per_rank_batch: int | None = None, world: World | None = None) -> None:
    """Computes the running statistics of batch normalisation again, over all ranks' batches; collective.

    Like `torch.optim.swa_utils.update_bn` (Izmailov et al., arXiv 1803.05407, section 3.2), for averaged weights. The
    statistics are the mean of those of the global batches, the same on every rank.

    Example:
        hvt.update_bn(train, averaged.module)

    Args:
        data: as of `evaluate`; the model takes the first part of a batch that is a tuple or list.
        model: with its new weights, the same on every rank.
        per_rank_batch, world: as of `evaluate`.

    Raises:
        ConfigError: as of `evaluate`, or a batch-norm layer of an unknown kind.
        ReplicaError: the model differs between ranks.
    """
    world = given_or_current(world, "torch")
    module = unwrap(model)
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
    momenta = [layer.momentum for layer in layers]
    if not layers:
        return
    with one_pass(model, data, per_rank_batch, world, "auto", None) as batches, converted(module, engine_of(world)):
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # the mean over batches
        module.train()
        try:
            for batch, step in batches.one_pass(padded=True):
                with sync_batchnorm_mode("uncounted" if step.padding else "counted"):
                    module(batch[0] if isinstance(batch, (tuple, list)) else batch)
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum


def _forward(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Mapping):
        return model(**batch), batch
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise ConfigError(
            "a batch for evaluation must be (inputs ..., targets), or a dict of the model's arguments",
            f"a {type(batch).__name__}" + (f" of {len(batch)}" if hasattr(batch, "__len__") else ""),
            "give arrays (x, y), a data set (or collate) that returns such tuples or dicts,\n"
            "or forward=lambda model, batch: (outputs, targets)",
        )
    return model(*batch[:-1]), batch[-1]


def _merged(results: list[dict[str, float]]) -> dict[str, float]:
    names = [name for its in results for name in its]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            "metrics must have different names",
            f"{', '.join(twice)} twice",
            "{name: metric} names objects; functions must return other keys",
            shared=True,
        )
    return {name: value for its in results for name, value in its.items()}


def _kept(metrics: Any, device: torch.device) -> list[States | _Means | _Predictions]:
    """Returns what keeps each of the metrics; raises `ConfigError` for what is none of the kinds of `evaluate`."""
    if metrics is classification:
        fix = "hvdtrain.torch.classification(), or classification(top=(1, 5))"
        raise ConfigError("classification must be called: it returns the metrics", "the function itself", fix)
    if isinstance(metrics, (list, tuple)):
        return [kept for part in metrics for kept in _kept(part, device)]
    if isinstance(metrics, Corpus):
        return [_Predictions(metrics)]
    named = metrics if isinstance(metrics, Mapping) else {"": metrics}
    if named and all(_has_verbs(metric) for metric in named.values()):
        return [States(name, metric, device) for name, metric in named.items()]
    if callable(metrics) and not isinstance(metrics, type):
        return [_Means(metrics)]
    raise ConfigError(
        "metrics must be a function, objects with update/compute/reset, or hvt.corpus_metrics(function)",
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
                "a metrics function must return a dict {name: one value per sample}",
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
            raise no_samples()
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
            "a metric must be a tensor with one value per sample, or a pair (values, weights)",
            f"{name}: {received} for {samples} samples",
            'no mean: reduction="none", or (outputs.argmax(1) == targets); for tokens (losses, labels != -100)',
        )
    values = values.detach().to(torch.float64)
    if not weighted:
        return torch.stack([values.sum(), values.new_tensor(samples)])
    if not isinstance(weights, Tensor) or weights.shape != values.shape:
        received = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ConfigError("each value of a metric needs a weight", f"{name}: {tuple(values.shape)} and {received}")
    weights = weights.to(values)
    return torch.stack([torch.where(weights == 0, 0.0, values * weights).sum(), weights.sum()])


@dataclass(frozen=True)
class Corpus:
    """The metrics of `corpus_metrics`."""

    function: Callable[[Any, Any], Mapping[str, float]]


def corpus_metrics(function: Callable[[Any, Any], Mapping[str, float]]) -> Corpus:
    """Returns metrics for `evaluate` that need all predictions at once (F1, AUC, BLEU).

    Example:
        auc = hvt.corpus_metrics(lambda outputs, targets: {"auc": roc_auc_score(targets, outputs)})
        scores = hvt.evaluate(model, validation, auc, per_rank_batch=100)

    Args:
        function: called once, on rank 0, with all outputs and targets, in order, on the CPU; returns numbers by name.
    """
    return Corpus(function)


class _Predictions:
    """Collects all outputs and targets."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.batches: list[tuple[Step, Any]] = []

    def add(self, step: Step, outputs: Any, targets: Any) -> None:
        self.batches.append((step, map_tensors(Tensor.cpu, (outputs, targets))))

    def results(self, world: World) -> dict[str, float]:
        outputs, targets = gather_in_order(self.batches, world=world)
        return world.on_main(lambda: numbers_of("", self.corpus.function(outputs, targets)))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; at the end each module is in the mode it was in (frozen parts differ)."""
    with kept_modes((*model.modules(), unwrap(model))), torch.no_grad():  # a pipeline's modules lack its root
        model.eval()
        yield


def classification(top: tuple[int, ...] = (1, 5), label_smoothing: float = 0.0) -> Metrics:
    """Returns metrics of class scores: "loss" (cross-entropy) and "top1", "top5", ...

    "topk" is 1 if the target is among the k highest scores. Equal scores rank in class order; NaN is never right.

    Example:
        scores = hvt.evaluate(model, validation, hvt.classification(top=(1, 5)), per_rank_batch=100)

    Args:
        top: the values of k.
        label_smoothing: as of `torch.nn.functional.cross_entropy`.
    """
    if not isinstance(top, (tuple, list)):
        raise ConfigError("top must be a tuple of whole numbers", f"top={top!r}", "classification(top=(1,))")
    if any(isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in top):
        raise ConfigError("top must contain whole numbers >= 1", f"top={top!r}")

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
    """Checks that there is one class a sample, and (not on a GPU, which would have to wait) a score for it."""
    received = [
        f"{name} {tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else f"{name}: {type(value).__name__}"
        for name, value in (("scores", outputs), ("targets", targets))
    ]
    tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    whole = tensors and not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)
    if not whole or outputs.shape[:1] != targets.shape or outputs.dim() != 2:
        raise ConfigError(
            "classification() needs scores [n, classes] and targets [n], one class per sample",
            ", ".join(received),
            "targets.argmax(1) of probabilities, targets.squeeze(1) of [n, 1], targets.long() of other numbers;\n"
            "otherwise give your own metrics",
        )
    if targets.device.type != "cpu" or not len(targets):
        return
    least, most = int(targets.min()), int(targets.max())
    if least < 0 or most >= outputs.shape[1]:
        raise ConfigError(
            "each target must be a class that has a score",
            f"targets from {least} to {most}, scores of {outputs.shape[1]} classes",
            "remove samples that do not count (-100) from the data; or give your own metrics",
        )
