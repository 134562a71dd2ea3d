"""The samples, models and losses of Lightning's and Fabric's programs, in float64."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "torch"))  # of cases.py

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

warnings.filterwarnings("ignore")
torch.set_default_dtype(torch.float64)
WIDE, KINDS, TRAIN, VALID = 6, 4, 37, 13  # 37 = 3 x 12 + 1: all but one rank have no sample in the last update
BATCH = 12  # of all ranks
MADE = torch.Generator().manual_seed(0)
X, Y = torch.randn(TRAIN, WIDE, generator=MADE), torch.randint(0, KINDS, (TRAIN,), generator=MADE)
XV, YV = torch.randn(VALID, WIDE, generator=MADE), torch.randint(0, KINDS, (VALID,), generator=MADE)
HOLES = torch.where(torch.rand(TRAIN, generator=MADE) < 0.4, -100, Y)
NOISE = torch.randn(TRAIN, 2, generator=MADE)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


def data(batch: int, *parts: Tensor, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*parts), batch_size=batch, **options)


def network(seed: int = 3, *middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDE, 8), *middle, nn.Tanh(), nn.Linear(8, KINDS))


def adversaries() -> tuple[nn.Sequential, nn.Sequential]:
    """Returns a GAN's generator and discriminator."""
    torch.manual_seed(5)
    return tuple(  # type: ignore[return-value]
        nn.Sequential(nn.Linear(wide, 8), nn.Tanh(), nn.Linear(8, out)) for wide, out in ((2, WIDE), (WIDE, 1))
    )


def judged(scores: Tensor, real: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, real))


def contrast(scores: Tensor, x: Tensor) -> Tensor:
    """Compares each sample with each other one."""
    return ((scores - scores.T) - (x[:, :1] - x[:, :1].T)).square().mean()
