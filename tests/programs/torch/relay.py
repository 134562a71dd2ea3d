"""One training, carried from engine to engine by its checkpoints.

Usage: relay.py FOLDER:ENGINE=UPDATES ... Trains the updates of each leg in turn, in this process, from the newest
checkpoint in FOLDER to the next; prints a line of JSON a leg. Batches have 8 samples of all ranks together.
"""

from __future__ import annotations

import json
import re
import sys

import torch
from torch import nn

import hvdtrain
import hvdtrain.torch as hvt

SAMPLES, GLOBAL_BATCH = 40, 8


def data() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    return torch.randn(SAMPLES, 4, generator=made), torch.randn(SAMPLES, 2, generator=made)


def leg(folder: str, engine: str, updates: int) -> None:
    with hvdtrain.init("torch", engine=engine) as world:
        module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        train = hvt.loader(data(), GLOBAL_BATCH // world.size)
        model, optimizer = hvt.prepare(module, optimizer, train)
        checkpoints = hvdtrain.Checkpointer(folder, world=world)
        found = checkpoints.restore(hvt.model_state(model, optimizer, train))
        began = {"weights": hvt.fingerprint(model), "step": found.step if found else 0, "place": list(train.position)}
        goal = optimizer.progress.step + updates
        while optimizer.progress.step < goal:
            for x, y in train:
                optimizer.zero_grad()
                optimizer.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                if optimizer.progress.step == goal:  # saved within the loop, to go on within the epoch
                    place = list(train.position)
                    checkpoints.save(hvt.model_state(model, optimizer, train), progress=optimizer.progress)
                    break
        ended = {"weights": hvt.fingerprint(model), "step": optimizer.progress.step, "place": place}
        facts = {"engine": world.engine, "size": world.size, "began": began, "ended": ended}
        if world.is_main:
            print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for text in sys.argv[1:]:
        folder, name, updates = re.fullmatch(r"(.*):(\w+)=(\d+)", text).groups()  # type: ignore[union-attr]
        leg(folder, name, int(updates))
