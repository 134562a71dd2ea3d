"""Evaluation on all ranks together: every sample exactly once, whatever their number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvdtrain.core.errors import ConfigError, ReplicaError
from hvdtrain.core.sharding import check_evaluation
from hvdtrain.core.world import World, fsum, given_or_current
from hvdtrain.torch.clock import CLOCK
from hvdtrain.torch.data.create import loader
from hvdtrain.torch.data.loader import Loader
from hvdtrain.torch.data.source import Augment
from hvdtrain.torch.engines.buffers import synchronize
from hvdtrain.torch.engines.shell import unwrap

# (outputs, targets) -> {name: [n], one value a sample}
Metrics = Callable[[Any, Any], Mapping[str, Tensor]]


def evaluate(
    model: nn.Module,
    data: Any,
    metrics: Metrics,
    *,
    per_rank_batch: int | None = None,
    world: World | None = None,
    workers: int | Literal["auto"] = "auto",
    augment: Augment | None = None,
) -> dict[str, float]:
    """Returns the mean of each metric over all samples, the same numbers on every rank; collective.

    Replicas' buffers are made equal first. The model is in evaluation mode while it runs, and afterwards each of its
    parts in the mode it was in.

    Args:
        model: called with all parts of a batch but the last.
        data: the same on every rank: what `loader` takes, or a `Loader`.
        metrics: called with the model's outputs and the last part of the batch; for example `classification()`.
        per_rank_batch: samples a rank takes at a time; not needed with a `Loader`.
        world: the ranks; by default those of `hvdtrain.init`.
        workers: as of `loader`.
        augment: as of `loader`; here for what turns samples into inputs (`normalise`).

    Raises:
        ConfigError: no samples, batches without targets, or metrics that are not one number a sample.
        ReplicaError: on every rank, when ranks report different metrics.
    """
    world = given_or_current(world, "torch")
    before = CLOCK.enter("evaluation")
    batches = data if isinstance(data, Loader) else None
    try:
        check_evaluation(data, per_rank_batch)
        if batches is None:
            assert per_rank_batch is not None  # checked
            batches = loader(data, per_rank_batch, world=world, shuffle=False, workers=workers, augment=augment)
        synchronize(model, world)
        with evaluating(model):
            sums, count = _sums(model, batches, metrics)
        return _joined(sums, count, world)
    finally:
        if batches is not None and batches is not data:
            batches.close()
        CLOCK.enter(before)


def _sums(model: nn.Module, batches: Loader, metrics: Metrics) -> tuple[dict[str, float], int]:
    """This rank's sums of each metric, in float64, and its number of samples."""
    totals: dict[str, Tensor] = {}
    count = 0
    for batch, step in batches.one_pass():
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise ConfigError(
                "a batch for evaluation is (inputs ..., targets)",
                f"a {type(batch).__name__}" + (f" of {len(batch)}" if hasattr(batch, "__len__") else ""),
                "give arrays (x, y), or a data set (or collate) that returns such tuples",
            )
        values = metrics(model(*batch[:-1]), batch[-1])
        if not isinstance(values, Mapping):
            raise ConfigError(
                "metrics return values by name, {name: one value a sample}",
                f"a {type(values).__name__}",
                'lambda outputs, targets: {"accuracy": outputs.argmax(1) == targets}',
            )
        for name, value in values.items():
            if not isinstance(value, Tensor) or value.shape != (step.samples,):
                received = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ConfigError(
                    "a metric is a tensor with one value a sample",
                    f"{name}: {received} for {step.samples} samples",
                    'without a mean: reduction="none", or (outputs.argmax(1) == targets)',
                )
            total = value.detach().to(torch.float64).sum()
            totals[name] = totals[name] + total if name in totals else total
        count += step.samples
    return {name: float(total) for name, total in totals.items()}, count


def _joined(sums: dict[str, float], count: int, world: World) -> dict[str, float]:
    """Means over all ranks; a rank that had no samples knows no names, and agrees to those of the others."""
    reports = world.gather((sums, count))
    samples = sum(its_count for _, its_count in reports)
    named = [its_sums for its_sums, its_count in reports if its_count]
    if not samples:
        raise ConfigError("evaluation needs samples", "no sample could be read, or there is none", shared=True)
    if any(list(other) != list(named[0]) for other in named[1:]):
        raise ReplicaError(
            "every rank must report the same metrics", "\n".join(", ".join(other) for other in named), shared=True
        )
    return {name: fsum([its_sums[name] for its_sums in named]) / samples for name in named[0]}


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
