"""Models that are split in tests: in float64, without random draws (those have a test of their own)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

BATCH, CLASSES = 10, 10


class TwoCross(nn.Module):
    """Two tensors cross every cut in the middle; one of them is a tuple's part, and one layer is used in place."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])
        self.right = nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])
        self.act = nn.ReLU(inplace=True)
        self.norm = nn.LayerNorm(12)
        self.out = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x, x * 2
        for left, right in zip(self.left, self.right, strict=True):
            a, b = self.act(left(a)) + b, torch.tanh(right(b)) * a
        return self.out(torch.cat([self.norm(a), b], dim=1))


class Encoder(nn.Module):
    """A transformer encoder with tied weights: the last layer's are the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens))).mean(dim=1)


class Nested(nn.Module):
    """Nested tuples with a number in them cross; the second argument is used late."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Any) -> tuple[Tensor, tuple[Tensor, int]]:
            if isinstance(x, tuple):
                x = x[0] + x[1][0] * x[1][1]
            return torch.tanh(self.a(x)), (torch.sigmoid(self.b(x)), 2)

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList([self.Pair() for _ in range(4)])
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, late: Tensor) -> Tensor:
        for pair in self.pairs:
            x = pair(x)
        return self.head(x[0] * x[1][0] + late)


def images(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(BATCH, 3, size, size),)


# each model, and what goes in
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "two_cross": (TwoCross, lambda: (torch.randn(BATCH, 12),)),
    "encoder": (Encoder, lambda: (torch.randint(CLASSES, (BATCH, 6)),)),
    "nested": (Nested, lambda: (torch.randn(BATCH, 8), torch.randn(BATCH, 8))),
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=CLASSES), lambda: images(40)),
    "densenet121": (lambda: torchvision.models.densenet121(num_classes=CLASSES), lambda: images(64)),
}
