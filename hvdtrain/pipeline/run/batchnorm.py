"""Statistics that move once a batch, although the layers see micro-batches.

A batch-norm layer normalises each micro-batch by that micro-batch's own mean and variance: to use the whole batch's,
every layer would have to see all micro-batches before any could continue: there would be no pipeline. (GPipe, arXiv
1811.06965, section 2.) An unchanged layer would also move its running statistics once a micro-batch, m times as fast
as the unsplit model. Here it moves them once a batch, by the mean and variance pooled over all samples (Chan, Golub,
LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979). Instance norm averages its
samples' own statistics. Spectral norm makes its step of the power iteration before the first micro-batch only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.values.places import pinned
from hvdtrain.pipeline.values.threads import surely

_OURS = ("running_mean", "running_var", "num_batches_tracked")


class Layer:
    """A layer while its statistics are gathered; only the thread of its stage calls it."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self._micro, self._again = 0, False
        self._hook: Any = None

    def open(self) -> None:
        self._hook = self.layer.register_forward_pre_hook(self._before)

    def turn(self, micro: int, *, again: bool) -> None:
        """A pass of this micro-batch comes; `again`: a recomputation, which shows nothing new."""
        self._micro, self._again = micro, again

    def differentiate(self, micro: int) -> None:
        """A backward pass of this micro-batch comes, which the user's own `torch.utils.checkpoint` may call it in."""
        self.turn(micro, again=True)

    def _before(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        """The layer is called."""

    def close(self) -> None:
        """Restores the layer; may be called twice, or without `open`."""
        if self._hook is not None:
            self._hook.remove()

    def apply(self) -> None:
        """Moves the statistics as one call with the whole batch would."""


class _Running(Layer):
    """A batch or instance norm."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self._kept = {name: layer._buffers[name] for name in _OURS}
        self._momentum = layer.momentum
        self._seen: list[tuple[int, int, Tensor]] = []  # micro-batch, values in a channel, [mean, variance]
        self._differentiates = False
        self._calls: dict[tuple[int, bool], int] = {}  # of a micro-batch, in its forward or its backward pass

    def open(self) -> None:
        super().open()
        # with a momentum of 1 a layer's "running" statistics are those of the last batch: no second look at the data
        self.layer.momentum = 1.0
        self.layer._buffers["num_batches_tracked"] = None

    def differentiate(self, micro: int) -> None:
        """Lets such a call move the statistics, as in the unsplit model; only once if the pass is in two parts."""
        self.turn(micro, again=False)
        self._differentiates = True

    def turn(self, micro: int, *, again: bool) -> None:
        super().turn(micro, again=again)
        self._differentiates = False

    def _before(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        both = torch.zeros_like(self._kept["running_mean"].expand(2, -1))
        layer._buffers["running_mean"], layer._buffers["running_var"] = both[0], both[1]
        key = self._micro, self._differentiates
        self._calls[key] = self._calls.get(key, 0) + (not self._again)
        repeated = self._differentiates and self._calls[key] > self._calls.get((self._micro, False), 0)
        if not self._again and not repeated:
            x = arguments[0]
            self._seen.append((self._micro, x.numel() // x.shape[1], both))

    def close(self) -> None:
        super().close()
        self.layer.momentum = self._momentum
        self.layer._buffers.update(self._kept)

    def apply(self) -> None:
        """Moves the statistics once for each call in a pass."""
        combined = averaged if isinstance(self.layer, _InstanceNorm) else pooled
        calls: dict[int, list[tuple[int, Tensor]]] = {}
        counts: dict[int, int] = {}
        for micro, values, both in self._seen:
            call = counts[micro] = counts.get(micro, -1) + 1
            calls.setdefault(call, []).append((values, both))
        for call in sorted(calls):
            mean, variance = combined(calls[call])
            tracked, factor = self._kept["num_batches_tracked"], self._momentum
            if tracked is not None and combined is pooled:
                tracked.add_(1)
                factor = tracked.reciprocal().to(mean.dtype) if factor is None else factor  # on a GPU: nobody waits
            for name, value in (("running_mean", mean), ("running_var", variance)):
                running = self._kept[name]
                running.copy_(running.to(value.dtype).lerp(value, 0.0 if factor is None else factor))


class _PowerIteration(Layer):
    """Spectral norm: in training it makes one step at each call, which the unsplit model makes once a batch."""

    _calls = 0

    def turn(self, micro: int, *, again: bool) -> None:
        super().turn(micro, again=again)
        self.layer.training = micro == 0

    def _before(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._calls += self._micro == 0 and not self._again
        if self._calls > 1:
            raise ConfigError(
                "a layer with spectral norm cannot be called twice in a pass with several micro-batches",
                f"{type(layer).__name__} is called twice",
                'micro_batches=1; or split(..., batch_norm="micro"): each micro-batch makes a power iteration',
            )

    def close(self) -> None:
        super().close()
        self.layer.training = True


def _layer(module: nn.Module) -> Layer | None:
    if not module.training:
        return None
    if isinstance(module, (_BatchNorm, _InstanceNorm)):
        return _Running(module) if module.running_mean is not None else None
    return _PowerIteration(module) if _is_spectral(module) else None


def _is_spectral(module: nn.Module) -> bool:
    return isinstance(module, _SpectralNorm) or any(
        isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()
    )


class Moving:
    """The state that each training pass changes (buffers by id, attributes) and that cannot be corrected afterwards."""

    def __init__(self, model: nn.Module, changing: Collection[int], counts: Sequence[tuple[str, nn.Module]]) -> None:
        self._counts = counts
        self._buffers = [
            (f"{path}.{name}".lstrip("."), owner)
            for path, owner in model.named_modules()
            for name, buffer in owner._buffers.items()
            if id(buffer) in changing
            and not (isinstance(owner, (_BatchNorm, _InstanceNorm)) or _is_spectral(owner))  # `Pooled` knows how
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
                f"{_first(moving)} in {micro_batches} micro-batches;\n"
                "only batch norm, instance norm and spectral norm are handled",
                'micro_batches=1; or split(..., batch_norm="micro"): all such values change once per micro-batch',
            )


def _first(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{', ...' * (len(names) > 5)}"


def pooled(parts: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of several groups together, float64; of each the number of values in a channel, and
    [2, channels]: its mean and unbiased variance."""
    values, counts = _stacked(parts)
    counts = counts.unsqueeze(1)
    means, variances = values.unbind(1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    squares = variances * (counts - 1) + (means - mean).square() * counts
    return mean, squares.sum(0) / (total - 1)


def _stacked(parts: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """Returns statistics and counts, each as one float64 tensor on the device; the host does not wait for a GPU."""
    values = torch.stack([both for _, both in parts]).double()  # few large operations: there may be a hundred layers
    counts = torch.tensor([count for count, _ in parts], dtype=torch.float64)
    return values, pinned(counts).to(values.device, non_blocking=True) if values.is_cuda else counts


def averaged(parts: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """Mean of several groups' means and variances; arguments as of `pooled`."""
    values, counts = _stacked(parts)
    mean, variance = (values * (counts / counts.sum())[:, None, None]).sum(0)
    return mean, variance


class Pooled:
    """Gathers the statistics of all such layers in training; outside of `gathering` they are as they were."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._layers = [layer for layer in map(_layer, dict.fromkeys(modules)) if layer is not None]
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

    def of(self, modules: Iterable[nn.Module]) -> list[Layer]:
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
