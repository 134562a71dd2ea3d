"""What is restarted: `train.py FOLDER EPOCHS UPDATES_PER_S`, with a save each 10 updates.

Rank 0 notes each update and the samples of all ranks in FOLDER/updates, and leaves the weights in FOLDER/final.pt. A
rank breaks as FOLDER/break says: "raise", "exit", "loop" or "segv"; whichever takes that file away.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import hvdtrain
import hvdtrain.torch as hvt

SAMPLES, BATCH, CLASSES, FEATURES, SAVE_EACH = 240, 12, 3, 6, 10


def samples() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, labels and numbers."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    noise = torch.randn(SAMPLES, CLASSES, generator=generator, dtype=torch.float64)
    return (
        x,
        (x @ torch.randn(FEATURES, CLASSES, generator=generator, dtype=torch.float64) + noise).argmax(1),
        torch.arange(SAMPLES),
    )


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.003)


def break_as_told(folder: Path) -> None:
    how = ""
    with contextlib.suppress(FileNotFoundError):  # another rank has taken it, or there is none
        (folder / "break").rename(folder / f"break.{os.getpid()}")
        how = (folder / f"break.{os.getpid()}").read_text()
    if how == "raise":
        raise OSError(f"as told, {time.time()}")
    if how == "exit":
        sys.exit(3)
    if how == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    while how == "loop":
        pass


def main() -> None:
    folder, epochs, rate = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    with hvdtrain.init("torch", device="cpu") as world:
        plain, optimizer = build()
        train = hvt.loader(samples(), BATCH // world.size)
        model, trained = hvt.prepare(plain, optimizer, train)
        checkpoints = hvdtrain.Checkpointer(folder / "checkpoints", keep=3)
        state = hvt.model_state(model, trained, train)
        checkpoints.restore(state)
        with (folder / "updates").open("a", buffering=1) as updates:
            for _ in train.epochs(epochs):
                for x, y, ids in train:
                    time.sleep(1 / rate)
                    break_as_told(folder)
                    optimizer.zero_grad()
                    trained.backward(nn.functional.cross_entropy(model(x), y))
                    trained.step()
                    taken = world.gather([] if train.step.padding else ids.tolist())
                    if world.is_main:
                        print(json.dumps([trained.progress.step, sum(taken, [])]), file=updates)
                    if trained.progress.step % SAVE_EACH == 0:
                        checkpoints.save(state, progress=trained.progress)
        if world.is_main:
            torch.save(plain.state_dict(), folder / "final.pt")


if __name__ == "__main__":
    main()
