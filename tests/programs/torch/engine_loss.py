"""A rank that is gone: rank 1 ends before the third collective, and rank 0 must say so. Usage: engine_loss.py ENGINE"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn

import hvdtrain
from hvdtrain.torch.engines.base import Pass, Transport


def main(engine: str) -> None:
    with hvdtrain.init("torch", engine=engine) as world:
        bound: Any = world.comm.bind(  # type: ignore[attr-defined]
            module := nn.Linear(3, 2), torch.optim.SGD(module.parameters(), lr=0.1), Transport()
        )
        for step in range(4):
            if step == 2 and world.rank == 1:
                os._exit(0)
            module.zero_grad()
            bound.backward(bound.call(torch.ones(1, 3)).sum(), Pass(reduce=True))
            bound.finish()
            bound.step()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except hvdtrain.HvdtrainError as error:
        hvdtrain.exit_with("engine_loss", error, 0)
