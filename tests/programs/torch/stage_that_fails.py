"""Two ranks train a pipeline; in the second step a stage of rank 1 raises."""

from __future__ import annotations

import sys

import torch
from staged import cut, loader_of, plain, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.launchers import Detected
from hvdtrain.world import startup


def work(detected: Detected) -> None:
    torch.set_default_dtype(torch.float64)
    with hvdtrain.init("torch", device="cpu") as world:
        pipe = cut(plain())
        data = loader_of(world)
        _, optimizer = hvt.prepare(pipe, sgd(pipe), data)

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            if world.rank == 1 and optimizer.progress.step == 1:
                raise ValueError("rank 1 has had enough")
            return cross_entropy(outputs, targets)

        for x, y in data:
            optimizer.forward_backward(x, y, loss)
            optimizer.step()
        print("trained to the end", flush=True)


if __name__ == "__main__":
    sys.exit(startup.run_program("stage_that_fails", work))
