"""Batch normalisation over the batches of all ranks, on any engine and device.

PyTorch's own `SyncBatchNorm` needs GPUs and a torch.distributed group. This one needs `TorchEngine.sum_`: one sum of
2 x channels + 1 numbers forward, one of 2 x channels backward. Each rank counts by its samples, so uneven batches give
what one process with all of them would compute, and a batch that only keeps a rank in step counts nothing.
Formulas: Ioffe and Szegedy, arXiv 1502.03167, section 3, with sums over ranks in place of sums over the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvdtrain.core.errors import ConfigError
from hvdtrain.torch.engines.base import TorchEngine
from hvdtrain.world.world import current

# counted: part of the statistics. uncounted: takes part in the sums with zeros. alone: no collective at all, for a
# forward pass that the other ranks do not make.
Mode = Literal["counted", "uncounted", "alone"]
_mode: Mode = "counted"

# beside the layers, not in them: a copy of the model (an average of weights, an export) must not carry an engine along
_engines: WeakKeyDictionary[nn.Module, TorchEngine] = WeakKeyDictionary()
_uncounted: WeakSet[nn.Module] = WeakSet()  # layers of models whose rank has no samples in the batch at hand


def convert(model: nn.Module, engine: TorchEngine, *, every: bool = True) -> nn.Module:
    """Makes every batch-norm layer of `model` normalise over all ranks (not `every`: only PyTorch's own
    `SyncBatchNorm`, which knows no ranks but those of torch.distributed); in place, and returns the model.
    Checkpoints are those of the plain model. Raises `ConfigError` for other kinds of batch norm, or an engine that
    cuts batches into pieces."""
    layers = [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm if every else nn.SyncBatchNorm)
    ]
    pieces = getattr(engine, "pieces", 1)
    if pieces > 1 and (layers or every):
        raise ConfigError(
            "sync_batchnorm= is not supported with several devices per rank",
            f"{engine.name} with {pieces} devices",
            'use engine="ddp" or "horovod" with a rank per device, or remove sync_batchnorm',
        )
    for name, layer in layers:
        if engine.size > 1 or isinstance(layer, nn.SyncBatchNorm):
            kind = _KINDS.get(type(layer), type(layer))
            if not issubclass(kind, SyncBatchNorm):
                raise ConfigError(
                    "sync_batchnorm= needs layers of type BatchNorm1d, BatchNorm2d or BatchNorm3d",
                    f"{name or 'the model'} is {type(layer).__module__}.{type(layer).__qualname__}",
                    "use those layers, or remove sync_batchnorm",
                )
            layer.__class__ = kind  # not a new layer: the optimizer, hooks and shared references know this one
            _engines[layer] = engine
    return model


def revert(layers: Iterable[nn.Module]) -> None:
    """Makes those that `convert` changed plain again, in place."""
    for layer in layers:
        if _engines.pop(layer, None) is not None:
            layer.__class__ = next((plain for plain, kind in _KINDS.items() if kind is type(layer)), type(layer))


def count_unsynchronized(model: nn.Module) -> int:
    """Returns how many batch-norm layers normalise over the batch of their own rank."""
    layers = {layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)}
    return len(layers - set(_engines))


@contextmanager
def converted(model: nn.Module, engine: TorchEngine) -> Iterator[None]:
    """Makes every batch-norm layer of `model` normalise over all ranks (see `convert`) while the context is open."""
    others = [layer for layer in model.modules() if layer not in _engines]
    convert(model, engine)
    try:
        yield
    finally:
        revert(others)


@contextmanager
def sync_batchnorm_mode(mode: Mode) -> Iterator[None]:
    """Sets how the layers treat forward passes while the context is open; see `Mode`."""
    global _mode
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


@contextmanager
def uncounting(model: nn.Module) -> Iterator[None]:
    """Keeps forward passes of the model's layers from counting while the context is open."""
    layers = [layer for layer in model.modules() if layer in _engines]
    _uncounted.update(layers)
    try:
        yield
    finally:
        _uncounted.difference_update(layers)


def is_synchronized(layer: nn.Module) -> bool:
    """Returns True if the layer's running statistics are those of all ranks' samples, on every rank."""
    return layer in _engines


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalisation over all ranks while training; plain in evaluation, and in copies of the model."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalises [samples, channels, ...]."""
        engine = _engines.get(self)
        if engine is None or _mode == "alone" or not self.training:
            return nn.modules.batchnorm._BatchNorm.forward(self, x)
        self._check_input_dim(x)
        counted = _mode == "counted" and self not in _uncounted
        output, mean, var, count = _BatchNormalise.apply(x, self.weight, self.bias, self.eps, engine, counted)
        self._track(mean, var, count)
        return output

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = var * (count / (count - 1)).to(var.dtype)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)


class _BatchNormalise(torch.autograd.Function):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, with mean and var over all ranks' counted samples."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, engine: TorchEngine, counted: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        precise = torch.float64 if x.dtype == torch.float64 else torch.float32
        own = x.numel() // x.shape[1] if counted else 0
        # in float64, so that the difference of squares below loses nothing that float32 would keep
        sums = torch.zeros(2 * x.shape[1] + 1, dtype=torch.float64, device=x.device)
        if own:
            own_var, own_mean = torch.var_mean(x.to(precise), _all_but_channels(x), correction=0)
            own_mean, own_var = own_mean.double(), own_var.double()
            sums[:-1] = torch.cat([own_mean, own_var + own_mean.square()]) * own
        sums[-1] = own
        count = _summed(engine, sums)[-1]
        if own < 2 and float(count) < 2:  # looking at the sum waits for a GPU
            raise ValueError(
                f"batch normalisation needs more than 1 value per channel, got {int(count)} over all ranks"
            )
        exact_mean, squares = (sums[:-1] / count).chunk(2)
        mean = exact_mean.to(precise)
        var = (squares - exact_mean.square()).clamp_min(0).to(precise)
        ctx.save_for_backward(x, weight, mean, var, count)
        ctx.eps, ctx.engine, ctx.counted = eps, engine, counted
        output = functional.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)
        ctx.mark_non_differentiable(mean, var, count)
        return output, mean, var, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, var, count = ctx.saved_tensors
        if torch.is_grad_enabled():  # this gradient is differentiated again: statistics as a function of the batch
            mean, var = _statistics(x, count, ctx.engine, ctx.counted)
        invstd = (var + ctx.eps).rsqrt()
        shape = [1, -1] + [1] * (x.dim() - 2)
        normal = (x.to(mean.dtype) - mean.view(shape)) * invstd.view(shape)
        grad = grad.to(mean.dtype)
        dims = _all_but_channels(x)
        grad_bias, grad_weight = grad.sum(dims), (grad * normal).sum(dims)
        both = torch.cat([grad_bias, grad_weight]).double()
        # the gradient of a rank that does not count must not count either, not even as 0 x NaN
        sums = _Sum.apply(both if ctx.counted else torch.zeros_like(both), ctx.engine) / count
        of_mean, of_normal = (half.to(mean.dtype).view(shape) for half in sums.chunk(2))
        scale = invstd if weight is None else invstd * weight.to(mean.dtype)
        grad_x = (grad - of_mean - normal * of_normal) * scale.view(shape)
        if weight is None:
            return grad_x.to(x.dtype), None, None, None, None, None
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None, None, None


class _Sum(torch.autograd.Function):
    """The sum over ranks; the gradient of the sum of their losses."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, engine: TorchEngine) -> Tensor:
        ctx.engine = engine
        return _summed(engine, values.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Sum.apply(grad, ctx.engine), None


def _statistics(x: Tensor, count: Tensor, engine: TorchEngine, counted: bool) -> tuple[Tensor, Tensor]:
    """Returns mean and variance of all ranks' samples, with their graph."""
    dims, wide = _all_but_channels(x), x.double()
    own = torch.cat([wide.sum(dims), wide.square().sum(dims)])
    mean, squares = (_Sum.apply(own if counted else torch.zeros_like(own), engine) / count).chunk(2)
    precise = torch.float64 if x.dtype == torch.float64 else torch.float32
    return mean.to(precise), (squares - mean.square()).clamp_min(0).to(precise)


def _summed(engine: TorchEngine, sums: Tensor) -> Tensor:
    world = current()
    with world.tracker.reduction("batch normalisation") if world is not None else nullcontext():
        return engine.sum_(sums)


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


class SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d):
    """`BatchNorm1d` over all ranks."""


class SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """`BatchNorm2d` over all ranks."""


class SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    """`BatchNorm3d` over all ranks."""


class SyncBatchNormAny(SyncBatchNorm):
    """A replacement of PyTorch's `SyncBatchNorm`."""

    def _check_input_dim(self, input: Tensor) -> None:
        nn.SyncBatchNorm._check_input_dim(self, input)  # type: ignore[arg-type]


_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
    nn.SyncBatchNorm: SyncBatchNormAny,
}
