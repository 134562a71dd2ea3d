"""`rehearsed.py FOLDER UPDATES`: a few updates with hvdtrain, with a run log and checkpoints in FOLDER.

Prints each rank's weights in bits, and whether training had been begun before.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import hvdtrain
import hvdtrain.torch as hvt


def main() -> None:
    folder, updates = Path(sys.argv[1]), int(sys.argv[2])
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(1024, 4, generator=draw, dtype=torch.float64)
    with hvdtrain.init("torch", device="cpu", seed=1) as world:
        train = hvt.loader((x, x.sum(1, keepdim=True)), 2)
        plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        model, optimizer = hvt.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.01), train)
        checkpoints = hvdtrain.Checkpointer(folder / "checkpoints", keep=1)
        with hvdtrain.RunLog(folder / "run", world, config={}, progress=False, tensorboard=False) as run:
            state = hvt.model_state(model, optimizer, train)
            found = checkpoints.restore(state)
            for inputs, targets in train:
                optimizer.zero_grad()
                optimizer.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                run.step(**optimizer.record())
                checkpoints.save(state, progress=optimizer.progress)
                if optimizer.progress.step == updates:
                    break
        numbers = torch.cat([parameter.detach().flatten() for parameter in plain.parameters()])
        print("began anew:", found is None, "weights:", numbers.numpy().tobytes().hex(), flush=True)


if __name__ == "__main__":
    main()
