"""A ddp job whose last rank fails in its first attempt, after an update; usage: restarted.py OUT [fork]

Under `torchrun --max-restarts=1` the second attempt trains to the end. With "fork" each rank forks both attempts.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

import torch

import hvdtrain
import hvdtrain.torch as hvt


def main() -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with hvdtrain.init("torch", engine="ddp") as world:
        net = torch.nn.Linear(3, 1)
        data = hvt.loader(torch.utils.data.TensorDataset(torch.ones(8, 3), torch.ones(8, 1)), 2, workers=0)
        model, optimizer = hvt.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), data)
        for x, y in data:
            optimizer.zero_grad()
            optimizer.backward((model(x) - y).square().mean())
            optimizer.step()
            if attempt < 1 and world.rank == world.size - 1:
                raise SystemExit(1)
        optimizer.close()
        if world.is_main:
            Path(sys.argv[1]).write_text(str(attempt))


if __name__ == "__main__":
    if sys.argv[2:] == []:
        main()
    for attempt in "01" if sys.argv[2:] == ["fork"] else "":
        os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt
        child = multiprocessing.get_context("fork").Process(target=main)
        child.start()
        child.join()
        assert child.exitcode == 0 or attempt == "0", child.exitcode
