"""Ranks that average numbers until FOLDER/finish is there, each with a file FOLDER/rank-N; usage: steps.py FOLDER"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

folder, done = Path(sys.argv[1]), torch.zeros(1)
hvd.init()
print(f"rank {hvd.rank()} of {hvd.size()}", flush=True)
while not done.item():
    # the mean shows that all ranks took part; the maximum, that rank 0 saw the file and all shall end
    mean = hvd.allreduce(torch.tensor([float(hvd.rank())], dtype=torch.float64), name="mean")
    assert mean.item() == (hvd.size() - 1) / 2
    ends = torch.tensor([float(hvd.rank() == 0 and (folder / "finish").exists())])
    done = hvd.allreduce(ends, op=hvd.Max, name="done")
    (folder / f"rank-{hvd.rank()}").touch()
    time.sleep(0.02)
hvd.shutdown()
