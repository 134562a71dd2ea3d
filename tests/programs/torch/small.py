"""A small model, data and loop for the adapter's cases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hvdtrain.torch as hvt


def mlp(norm: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Linear(8, 3))


def sgd(model: nn.Module, **options: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def data(samples: int = 32) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 4, generator=made)
    return x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long()


def prepared(model: nn.Module | None = None, **options: Any) -> tuple[Any, Any, Any]:
    model = model if model is not None else mlp()
    train = hvt.loader(data(), 8)
    model, optimizer = hvt.prepare(model, sgd(model), train, **options)
    return model, optimizer, train


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def distance(model: nn.Module, before: list[Tensor]) -> float:
    """How far the parameters are from `before`, in the Euclidean norm."""
    return float(
        torch.sqrt(sum(((p.detach() - b) ** 2).sum() for p, b in zip(model.parameters(), before, strict=True)))
    )
