"""Ranks that average numbers, step after step, until FOLDER/finish is there; usage: steps.py FOLDER

Each rank keeps FOLDER/rank-N up to date: its process id and how many steps it has done. Rank 0 saves the step, and a
job that was started again goes on from there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

from hvdtrain.core import launchers

PACE_S = 0.02


def write(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def main(folder: Path) -> None:
    hvd.init()
    rank, saved, finish = hvd.rank(), folder / "saved", folder / "finish"
    first = int(saved.read_text()) if saved.exists() else 0
    attempt = launchers.restarts(os.environ)
    print(f"rank {rank} of {hvd.size()} begins at step {first}, restarts {attempt}", flush=True)
    step = first
    while True:
        step += 1
        # the mean tells that all ranks took part; the maximum, that rank 0 saw the file and all shall end
        mean = hvd.allreduce(torch.tensor([float(rank)], dtype=torch.float64), name="mean")
        assert mean.item() == (hvd.size() - 1) / 2
        done = hvd.allreduce(torch.tensor([float(rank == 0 and finish.exists())]), op=hvd.Max, name="done")
        if rank == 0:
            write(saved, str(step))
        write(folder / f"rank-{rank}", f"{os.getpid()} {step}")
        if done.item():
            break
        time.sleep(PACE_S)
    print(f"rank {rank} ends after step {step}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
