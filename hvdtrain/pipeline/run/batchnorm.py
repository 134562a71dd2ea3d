"""Statistics that move once a batch, although the layers see micro-batches.

A batch-norm layer normalises each micro-batch by that micro-batch's own mean and variance: to use the whole batch's,
every layer would have to see all micro-batches before any could continue: there would be no pipeline. (GPipe, arXiv
1811.06965, section 2.) An unchanged layer would also move its running statistics once a micro-batch, m times as fast
as the unsplit model. Here it moves them once a batch, by the mean and variance pooled over all samples (Chan, Golub,
LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.values.places import pinned
from hvdtrain.pipeline.values.threads import surely

_OURS = ("running_mean", "running_var", "num_batches_tracked")


class NormLayer:
    """A batch-norm layer while its statistics are gathered; only the thread of its stage calls it."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self._kept = {name: layer._buffers[name] for name in _OURS}
        self._momentum = layer.momentum
        self._seen: list[tuple[int, int, Tensor]] = []  # micro-batch, values in a channel, [mean, variance]
        self._micro, self._again = 0, False
        self._hook: Any = None

    def open(self) -> None:
        self._hook = self.layer.register_forward_pre_hook(self._before)
        # with a momentum of 1 a layer's "running" statistics are those of the last batch: no second look at the data
        self.layer.momentum = 1.0
        self.layer._buffers["num_batches_tracked"] = None

    def turn(self, micro: int, *, again: bool = False) -> None:
        """A pass of this micro-batch comes; `again`: a recomputation, which shows nothing new. Where the user's own
        `torch.utils.checkpoint` calls the layer in a backward pass, the statistics move as in the unsplit model."""
        self._micro, self._again = micro, again

    def _before(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        """The layer is called."""
        both = torch.zeros_like(self._kept["running_mean"].expand(2, -1))
        layer._buffers["running_mean"], layer._buffers["running_var"] = both[0], both[1]
        if not self._again:
            x = arguments[0]
            self._seen.append((self._micro, x.numel() // x.shape[1], both))

    def close(self) -> None:
        """Restores the layer; may be called twice, or without `open`."""
        if self._hook is not None:
            self._hook.remove()
        self.layer.momentum = self._momentum
        self.layer._buffers.update(self._kept)

    def apply(self) -> None:
        """Moves the statistics once for each call in a pass, as one call with the whole batch would."""
        calls: dict[int, list[tuple[int, Tensor]]] = {}
        counts: dict[int, int] = {}
        for micro, values, both in self._seen:
            call = counts[micro] = counts.get(micro, -1) + 1
            calls.setdefault(call, []).append((values, both))
        for call in sorted(calls):
            mean, variance = pooled(calls[call])
            tracked, factor = self._kept["num_batches_tracked"], self._momentum
            if tracked is not None:
                tracked.add_(1)
                factor = tracked.reciprocal().to(mean.dtype) if factor is None else factor  # on a GPU: nobody waits
            for name, value in (("running_mean", mean), ("running_var", variance)):
                running = self._kept[name]
                running.copy_(running.to(value.dtype).lerp(value, 0.0 if factor is None else factor))


class Moving:
    """The state that each training pass changes (buffers by id, attributes) and that cannot be corrected afterwards."""

    def __init__(self, model: nn.Module, changing: Collection[int], counts: Sequence[tuple[str, nn.Module]]) -> None:
        self._counts = counts
        self._buffers = [
            (f"{path}.{name}".lstrip("."), owner)
            for path, owner in model.named_modules()
            for name, buffer in owner._buffers.items()
            if id(buffer) in changing and not isinstance(owner, _BatchNorm)  # `Pooled` knows how
        ]

    def check(self, remat: str, micro_batches: int) -> None:
        """Refuses what would move through so many micro-batches."""
        counts = [name for name, owner in self._counts if owner.training]
        if counts and remat != "never":
            raise ConfigError(
                "a forward pass that remat repeats must not change attributes other than buffers",
                f"{_first(counts)} under remat={remat!r}: attributes that each pass changes",
                'remat="never"; or keep them in buffers',
            )
        moving = counts + [name for name, owner in self._buffers if owner.training]
        if moving and micro_batches > 1:
            raise ConfigError(
                "values that each forward pass changes cannot be updated once per batch with micro-batches",
                f"{_first(moving)} in {micro_batches} micro-batches; only batch norm is handled",
                'micro_batches=1; or split(..., batch_norm="micro"): all such values change once per micro-batch',
            )


def _first(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{', ...' * (len(names) > 5)}"


def pooled(parts: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of several groups together, float64; of each the number of values in a channel, and
    [2, channels]: its mean and unbiased variance."""
    values = torch.stack([both for _, both in parts]).double()  # few large operations: there may be a hundred layers
    counts = torch.tensor([[count] for count, _ in parts], dtype=torch.float64)
    if values.is_cuda:  # the host does not wait for the GPU
        counts = pinned(counts).to(values.device, non_blocking=True)
    means, variances = values.unbind(1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    squares = variances * (counts - 1) + (means - mean).square() * counts
    return mean, squares.sum(0) / (total - 1)


def _has_moving_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.training and module.running_mean is not None


class Pooled:
    """Gathers the statistics of all batch-norm layers in training; outside of `gathering` they are as they were."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._layers = [NormLayer(module) for module in dict.fromkeys(modules) if _has_moving_statistics(module)]
        self._by_module = {id(layer.layer): layer for layer in self._layers}

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Changes the running statistics at the end, unless there was an error."""
        try:
            for layer in self._layers:
                layer.open()
            yield
        finally:
            surely([layer.close for layer in self._layers])
        with torch.no_grad():
            for layer in self._layers:
                layer.apply()

    def of(self, modules: Iterable[nn.Module]) -> list[NormLayer]:
        """Returns the layers among these modules; a stage passes them the number of each micro-batch."""
        return [layer for layer in map(self._by_module.get, map(id, modules)) if layer is not None]


@contextmanager
def without_batch_statistics(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Gives batch-norm without running statistics some; else it uses the batch's in evaluation also."""
    bare = [
        module
        for module in modules
        if isinstance(module, _BatchNorm) and module.running_mean is None and module.running_var is None
    ]
    try:
        for module in bare:
            like = next(iter(module.parameters()), torch.zeros(module.num_features))
            module._buffers.update(running_mean=torch.zeros_like(like), running_var=torch.ones_like(like))
        yield
    finally:
        for module in bare:
            module._buffers.update(running_mean=None, running_var=None)
