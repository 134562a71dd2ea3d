"""A loss of three means with divisors of their own, on ranks, against one process with the global batch.

usage: terms.py ENGINE ACCUMULATE OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hvdtrain
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


def one_process() -> tuple[list[float], list[Tensor]]:
    model, losses = model_of(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(3):
        for first in range(0, SAMPLES, UPDATE):
            rows = slice(first, first + UPDATE)
            optimizer.zero_grad()
            loss = sum(mean for mean, count in means(model(X[rows]), KIND[rows], MASK[rows]) if count > 0)
            assert isinstance(loss, Tensor)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, [parameter.detach() for parameter in model.parameters()]


def on_ranks(world: hvdtrain.World, accumulate: int, way: str) -> tuple[list[float], list[Tensor]]:
    plain, losses = model_of(), []
    data = hvt.loader((X, KIND, MASK), UPDATE // world.size // accumulate, shuffle=False)
    model, optimizer = hvt.prepare(
        plain, torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9), data, accumulate=accumulate, verify=False
    )
    for _ in data.epochs(3):
        for x, kind, mask in data:
            optimizer.zero_grad()
            if way == "call":
                optimizer.forward_backward(x, (kind, mask), lambda out, y: means(out, *y))  # type: ignore[arg-type]
            elif way == "one weight":  # the twin: all means weighed by samples
                optimizer.backward(sum(mean.nan_to_num() for mean, _ in means(model(x), kind, mask)))  # type: ignore[arg-type]
            else:
                optimizer.backward(means(model(x), kind, mask))
            optimizer.step()
            found = optimizer.record()["loss"]
            losses += [] if found is None else [found]
    optimizer.close()
    return losses, [parameter.detach() for parameter in plain.parameters()]


def apart(found: list[Any], wanted: list[Any]) -> float:
    assert len(found) == len(wanted)
    return max(float((torch.as_tensor(f) - w).abs().max()) for f, w in zip(found, wanted, strict=True))


def main() -> None:
    engine, accumulate, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_default_dtype(torch.float64)
    wanted, report = one_process(), {}
    with hvdtrain.init("torch", engine=engine) as world:
        for way in ("loop", "call", "one weight"):
            found = on_ranks(world, accumulate, way)
            report[way] = [apart(its, right) for its, right in zip(found, wanted, strict=True)]
        reports = world.gather(report)
    if world.is_main:
        out.write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
