"""Models, data and loops for the cases of models in stages."""

from __future__ import annotations

from typing import Any

import torch
from cases import gap, plainly, quietly, windows
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hvdtrain
import hvdtrain.pipeline
import hvdtrain.torch as hvt

GLOBAL_BATCH = 8
SAMPLES = 29  # in a tail of 5 ranks have 3 and 2 samples, where a full batch has micro-batches of 2


def points(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(7)
    return torch.randn(samples, 6, generator=made), torch.randint(0, 3, (samples,), generator=made)


def plain() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(),
                         nn.Linear(16, 3))  # fmt: skip


class Tied(nn.Module):
    """The last layer's weight is the first one's: of a stage each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))[:, :3]


def tied() -> nn.Module:
    torch.manual_seed(1)
    return Tied()


def settled() -> nn.Module:
    """Batch-norm in evaluation mode, as where statistics are frozen."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(),
                          nn.Linear(8, 3))  # fmt: skip
    for layer in (model[1], model[4]):
        layer.eval()
        layer.running_mean.uniform_(-0.5, 0.5)
        layer.running_var.uniform_(0.5, 2.0)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)


def cut(model: nn.Module, micro_batches: int = 2, stages: int = 2, **how: Any) -> Any:
    """The model in stages, on one CPU."""
    how = {"balance": "memory", **how}
    example = points(GLOBAL_BATCH)[0].to(next(model.parameters()).dtype)
    return hvdtrain.pipeline.split(model, example, ["cpu"] * stages, micro_batches=micro_batches, **how)


def loader_of(world: hvdtrain.World, samples: int = SAMPLES) -> Any:
    return hvt.loader(points(samples), GLOBAL_BATCH // world.size, world=world, shuffle=False)


def by_hand(model: nn.Module, epochs: int = 2, accumulate: int = 1, clip: float = 0.0) -> list[float]:
    """One process, whole model, plain PyTorch: an update is the gradient of the mean over its samples."""
    batches = windows(GLOBAL_BATCH * accumulate, *points(), epochs=epochs)
    return plainly(model, sgd(model), batches, lambda model, x, y: cross_entropy(model(x), y), clip)


def run(optimizer: Any, data: Any, loss_of: Any = cross_entropy) -> list[float]:
    """Trains an epoch; returns the losses of its updates."""
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        optimizer.forward_backward(x, y, loss_of)
        optimizer.step()
        noted = optimizer.record()
        losses += [noted["loss"]] if noted["samples"] else []
    return losses


def on_ranks(model: Any, world: hvdtrain.World, epochs: int = 2, samples: int = SAMPLES, **options: Any) -> list[float]:
    data = loader_of(world, samples)
    prepared, optimizer = quietly(model, sgd(model), data, **options)
    losses = sum((run(optimizer, data) for _ in range(epochs)), [])
    world.agree("weights", hvt.fingerprint(prepared))
    optimizer.close()
    return losses


def same(model: nn.Module, twin: nn.Module, losses: list[float], wanted: list[float], bound: float = 1e-10) -> None:
    assert list(model.state_dict()) == list(twin.state_dict()), "names differ"
    assert gap(model, twin) <= bound, gap(model, twin)
    assert len(losses) == len(wanted)
    assert max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) <= bound
