"""The samples that Lightning's and Fabric's programs train on, in float64."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "torch"))  # of cases.py

import torch

warnings.filterwarnings("ignore")
torch.set_default_dtype(torch.float64)
WIDE, KINDS, TRAIN, VALID = 6, 4, 37, 13  # 37 = 3 x 12 + 1: all but one rank have no sample in the last update
BATCH = 12  # of all ranks
MADE = torch.Generator().manual_seed(0)
X, Y = torch.randn(TRAIN, WIDE, generator=MADE), torch.randint(0, KINDS, (TRAIN,), generator=MADE)
XV, YV = torch.randn(VALID, WIDE, generator=MADE), torch.randint(0, KINDS, (VALID,), generator=MADE)
HOLES = torch.where(torch.rand(TRAIN, generator=MADE) < 0.4, -100, Y)
