"""A loss of three means with divisors of their own, on ranks, against one process with the global batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from cases import apart, plainly, train, windows
from torch import Tensor, nn

import hvdtrain.torch as hvt

UPDATE, SAMPLES = 18, 43  # the last update has 7 samples
MADE = torch.Generator().manual_seed(0)
X = torch.randn(SAMPLES, 6, generator=MADE, dtype=torch.float64)
KIND = torch.randint(0, 3, (SAMPLES,), generator=MADE)
KIND[9:14] = -100  # batches, and ranks, in which no label counts
MASK = torch.rand(SAMPLES, 2, generator=MADE) > 0.6


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def means(out: Tensor, kind: Tensor, mask: Tensor) -> list[tuple[Tensor, Any]]:
    """Each with what it divides by; NaN where that is 0."""
    return [
        (F.cross_entropy(out[:, :3], kind, ignore_index=-100), (kind != -100).sum()),
        (2 * (out[:, 3:].abs() * mask).sum() / mask.sum(), mask.sum()),
        ((out**2).mean(), len(out)),
    ]


def trained(way: str, world: Any = None, accumulate: int = 1) -> tuple[list[float], list[Tensor]]:
    """Returns losses and weights: of one process ("plain"), or of ranks."""
    plain = model_of()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9)
    if way == "plain":
        counted = lambda model, x, *y: sum(mean for mean, count in means(model(x), *y) if count > 0)  # noqa: E731
        losses = plainly(plain, optimizer, windows(UPDATE, X, KIND, MASK, epochs=3), counted)
        return losses, [parameter.detach() for parameter in plain.parameters()]
    data = hvt.loader((X, KIND, MASK), UPDATE // world.size // accumulate, shuffle=False)
    model, optimizer = hvt.prepare(plain, optimizer, data, accumulate=accumulate, verify=False)
    losses = []
    for _ in data.epochs(3):
        if way == "loop":
            losses += train(model, optimizer, data, lambda model, x, *y: means(model(x), *y))
        for x, *y in data if way == "call" else ():
            optimizer.zero_grad()
            optimizer.forward_backward(x, tuple(y), lambda out, y: means(out, *y))
            optimizer.step()
            losses += [] if (found := optimizer.record()["loss"]) is None else [found]
    optimizer.close()
    return losses, [parameter.detach() for parameter in plain.parameters()]


def gaps(world: Any, accumulate: int) -> dict[str, list[float]]:
    """Returns how far losses and weights are from those of one process, for each way to train."""
    wanted, found = trained("plain"), {}
    for way in ("loop", "call"):
        pairs = zip(trained(way, world, accumulate), wanted, strict=True)
        found[way] = [apart(its, right) for its, right in pairs]
    return found
