"""Running statistics of the whole batch, gathered from micro-batches.

A batch-norm layer normalises each micro-batch by that micro-batch's own mean and variance: to use the whole batch's,
every layer would have to see all micro-batches before any could go on, and there would be no pipeline. (GPipe, arXiv
1811.06965, section 2.) A layer left alone would also move its running statistics once a micro-batch, m times as fast
as the unsplit model. Here it moves them once a batch, by the mean and variance pooled over all samples (Chan, Golub,
LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

_OURS = ("running_mean", "running_var", "num_batches_tracked")


class _Layer:
    """One layer while its statistics are gathered; only the thread of its stage calls it."""

    def __init__(self, layer: _BatchNorm) -> None:
        self.layer = layer
        self.kept = {name: layer._buffers[name] for name in _OURS}
        self.momentum = layer.momentum
        self.discard = False  # a recomputation shows nothing new
        self.micro = 0
        self.seen: list[tuple[int, int, Tensor]] = []  # micro-batch, values in a channel, [mean, variance]

    def open(self) -> None:
        # with a momentum of 1 a layer's "running" statistics are those of the last batch: no second look at the data
        self.layer.momentum = 1.0
        self.layer._buffers["num_batches_tracked"] = None
        self.hook = self.layer.register_forward_pre_hook(self._before)

    def _before(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        both = torch.zeros_like(self.kept["running_mean"].expand(2, -1))  # type: ignore[union-attr]
        layer._buffers["running_mean"], layer._buffers["running_var"] = both[0], both[1]
        if not self.discard:
            x = arguments[0]
            self.seen.append((self.micro, x.numel() // x.shape[1], both))

    def close(self) -> None:
        self.hook.remove()
        self.layer.momentum = self.momentum
        self.layer._buffers.update(self.kept)

    def apply(self) -> None:
        """Moves the running statistics as one call with the whole batch would; once for each call in a pass."""
        calls: dict[int, list[tuple[int, Tensor]]] = {}
        counts: dict[int, int] = {}
        for micro, values, both in self.seen:
            call = counts[micro] = counts.get(micro, -1) + 1
            calls.setdefault(call, []).append((values, both))
        for call in sorted(calls):
            mean, variance = pooled(calls[call])
            tracked, factor = self.kept["num_batches_tracked"], self.momentum
            if tracked is not None:
                tracked.add_(1)
                factor = 1.0 / float(tracked) if factor is None else factor
            for name, value in (("running_mean", mean), ("running_var", variance)):
                running = self.kept[name]
                assert running is not None
                running.lerp_(value.to(running.dtype), 0.0 if factor is None else factor)


def pooled(parts: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of several groups together; float64.

    Args:
        parts: values in a group, and [2, channels]: its mean and unbiased variance.
    """
    values = torch.stack([both for _, both in parts]).double()  # few large operations: there may be a hundred layers
    counts = values.new_tensor([count for count, _ in parts]).unsqueeze(1)
    means, variances = values.unbind(1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    squares = variances * (counts - 1) + (means - mean).square() * counts
    return mean, squares.sum(0) / (total - 1)


class Pooled:
    """Gathers the statistics of all batch-norm layers in training; outside of `gathering` they are as they were."""

    def __init__(self, module: nn.Module) -> None:
        self._layers = [
            _Layer(layer)
            for layer in module.modules()
            if isinstance(layer, _BatchNorm) and layer.training and layer.running_mean is not None
        ]
        self._by_module = {id(layer.layer): layer for layer in self._layers}

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Changes the running statistics at the end, unless there was an error."""
        for layer in self._layers:
            layer.open()
        try:
            yield
        finally:
            for layer in self._layers:
                layer.close()
        with torch.no_grad():
            for layer in self._layers:
                layer.apply()

    def of(self, modules: Iterable[nn.Module]) -> list[_Layer]:
        """The layers among these modules: a stage tells them which micro-batch comes."""
        return [layer for layer in map(self._by_module.get, map(id, modules)) if layer is not None]
