"""Complex numbers, lists of parameters, several rows a sample, losses that a model takes itself: against plain PyTorch.

Usage: unusual.py: a line of JSON; float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hvdtrain.pipeline
from hvdtrain.core.errors import HvdtrainError

BATCH, WIDTH, STEPS, WORDS = 10, 6, 4, 5
WAYS = (("gpipe", "except_last"), ("1f1b", "all"), ("zb-h1", "never"))


class Waves(nn.Module):
    """Complex numbers cross the cuts."""

    def __init__(self, *, real: bool) -> None:
        super().__init__()
        self.real = real
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fft.fft(self.first(x))
        for scale in self.scale:
            x = x * scale
        x = x * self.scale[0]
        return self.last(x.real) if self.real else x


class Rows(nn.Module):
    """Words [batch, steps]: rows [batch * steps, words]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x).tanh()).view(-1, WORDS)


class Judge(Rows):
    """Takes its loss itself, of labels that may be left out."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(x), labels.flatten())


def found(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def off(model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Any, Any], Tensor], **more: Any) -> float:
    """The largest difference of gradients, over all ways."""
    kwargs: Mapping[str, Any] = more.pop("kwargs", {})
    loss(model(x, **kwargs), y).backward()
    wanted, worst = found(model), 0.0
    for schedule, remat in WAYS:
        model.zero_grad()
        options = {"schedule": schedule, "remat": remat, "micro_batches": 3, "balance": "memory"}
        pipe = hvdtrain.pipeline.split(model, x, ["cpu"] * 2, kwargs=kwargs, **options)
        for _ in range(2):  # the second without what the first step is looked at for
            pipe.step(x, y, loss, kwargs=kwargs, **more)
        worst = max(worst, *(float((a / 2 - b).abs().max()) for a, b in zip(found(model), wanted, strict=True)))
    return worst


def said(attempt: Callable[[], Any]) -> str:
    try:
        return f"nothing raised: {attempt()}"
    except HvdtrainError as error:
        return str(error)


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    words, labels = torch.randint(WORDS, (BATCH, STEPS)), torch.randint(WORDS, (BATCH, STEPS))
    labels[:, 1:][torch.rand(BATCH, STEPS - 1) < 0.5] = -100
    own: dict[str, Any] = {"kwargs": {"labels": labels}}

    def as_it_is(loss: Tensor, _: Tensor) -> Tensor:
        return loss

    def counted(y: Tensor) -> Tensor:
        return (y != -100).sum()

    result = {
        "complex within": off(Waves(real=True), x, y, F.mse_loss),
        "complex outputs": off(Waves(real=False), x, y, lambda out, y: (out - y).abs().square().mean()),
        "rows": off(Rows(), words, labels, lambda out, y: F.cross_entropy(out, y.flatten()), weight=counted),
        "loss of the model": off(Judge(), words, labels, as_it_is, weight=counted, **own),
        "said": said(lambda: off(Judge(), words, labels, as_it_is, **own)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
