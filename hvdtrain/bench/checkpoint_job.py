"""One process of `hvdtrain bench checkpoint`: saves in both ways, in turns, and trains beside; prints JSON."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hvdtrain
from hvdtrain.checkpoint.parts import Part

PROGRAM = "hvdtrain.bench.checkpoint_job"
WIDTH = 1000  # of a layer: 4 MB, and as much of the optimizer's momentum
BATCH = 64
Training = tuple[Callable[[], object], Callable[[], Mapping[str, Part]]]  # an update; what is saved


def torch_training(layers: int) -> Training:
    """Linear layers with momentum."""
    import torch

    import hvdtrain.torch as hvt

    torch.set_num_threads(1)
    hvdtrain.init("torch")
    network = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    data = hvt.loader(torch.utils.data.TensorDataset(torch.zeros(BATCH, WIDTH)), BATCH)
    model, optimizer = hvt.prepare(network, torch.optim.SGD(network.parameters(), 1e-6, momentum=0.9), data)

    def update() -> None:
        for (x,) in data:
            optimizer.zero_grad()
            optimizer.backward(model(x).square().mean())
            optimizer.step()

    return update, lambda: hvt.model_state(model, optimizer)


def keras_training(layers: int) -> Training:
    """The same with Keras."""
    import keras
    import numpy as np

    import hvdtrain.keras as hvk

    hvdtrain.init("keras")
    model = keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH) for _ in range(layers))])
    model.compile(keras.optimizers.SGD(1e-6, momentum=0.9), "mse")
    hvk.prepare(model, verify=False)
    x = np.zeros((BATCH, WIDTH), "float32")
    model.fit(hvk.loader((x, x), BATCH), verbose=0, callbacks=hvk.callbacks(model))
    return lambda: model.train_on_batch(x, x), lambda: hvk.model_state(model)


def seconds(call: Callable[[], object]) -> float:
    """Of one call."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def image_bytes() -> int:
    """What this process and the one that writes hold of checkpoints in memory."""
    known = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    files = [path for path in known if os.path.islink(path) and os.readlink(path).startswith("/memfd:hvdtrain")]
    return sum(os.stat(path).st_blocks for path in files) * 512


def measure(training: Training, folder: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds of saves and of updates, round by round, and bytes."""
    update, state = training
    ways = {way: hvdtrain.Checkpointer(folder / way, keep=1, best=None, asynchronous=way == "later")
            for way in ("at once", "later")}  # fmt: skip
    found: dict[str, Any] = {name: [] for name in ("at once", "later", "sealed", "alone", "beside")}

    def save(way: str, step: int) -> tuple[float, Path]:
        begun = time.perf_counter()
        path = ways[way].save(state(), progress=hvdtrain.Progress(step=step))
        return time.perf_counter() - begun, path

    for number in range(-2, rounds):  # memory is touched for the first time in the first two
        update()
        at_once, _ = save("at once", number + 2)
        later, path = save("later", number + 2)
        begun, beside = time.perf_counter(), list[float]()
        while not path.exists():
            beside.append(seconds(update))
        sealed = later + time.perf_counter() - begun
        ways["later"].wait()
        alone = [seconds(update) for _ in range(steps)]
        if number >= 0:
            whole = beside[:-1] or beside  # in the last one it was finished
            row = (at_once, later, sealed, statistics.median(alone), statistics.median(whole))
            for name, value in zip(("at once", "later", "sealed", "alone", "beside"), row, strict=True):
                found[name].append(value)
    found["bytes"] = sum(file.stat().st_size for file in path.iterdir())
    found["image_bytes"] = image_bytes()
    return found


def main() -> int:
    """Prints the result as the last line."""
    parser = argparse.ArgumentParser(prog=PROGRAM)
    parser.add_argument("--framework", choices=["torch", "keras"])
    for name in ("--layers", "--rounds", "--steps"):
        parser.add_argument(name, type=int)
    parser.add_argument("--directory", type=Path)
    args = parser.parse_args()
    training = (torch_training if args.framework == "torch" else keras_training)(args.layers)
    print(json.dumps(measure(training, args.directory, args.rounds, args.steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
