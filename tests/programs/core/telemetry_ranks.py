"""Two ranks with one run log; usage: telemetry_ranks.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import torch_engine  # noqa: F401 (takes the adapter's place)

from hvdtrain import HvdtrainError, RunLog, World, init


def refused(folder: Path, world: World) -> None:
    try:
        RunLog(folder, world, config={})
    except HvdtrainError as error:
        print(f"refused: {error.rule}", flush=True)


with init("torch") as world:
    folder = Path(sys.argv[1])
    refused(folder / "file", world)
    with RunLog(folder / "run", world, config={"per_rank_batch": 32}, tensorboard=False) as log:
        refused(folder / "run", world)
        log.step(
            step=1, epoch=0, samples_seen=64, loss=1.0, lr=0.1, samples=64, seconds={"compute": 1.0 + world.rank}
        )  # fmt: skip
        log.epoch(0, {"loss": 1.0}, 2.0)
        log.event("note", text="from rank 0 only")
        log.result(accuracy=1.0)
