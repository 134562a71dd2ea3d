"""`rehearsal_ends.py SIGNAL ANCESTOR`: rank 0 sends its parent (1) or grandparent (2) a signal; workers are about."""

from __future__ import annotations

import os
import sys
from typing import Any

import horovod.torch as hvd
import psutil
import torch
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(4)


if __name__ == "__main__":
    number, ancestor = int(sys.argv[1]), int(sys.argv[2])
    hvd.init()
    for step, x in enumerate(DataLoader(Samples(), 2, num_workers=1, multiprocessing_context="spawn")):
        hvd.allreduce(x.sum(), name="x")
        if step == 3 and hvd.rank() == 0:
            os.kill(psutil.Process().parents()[ancestor - 1].pid, number)
