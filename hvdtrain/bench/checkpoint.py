"""Measures what a checkpoint costs training, in paired runs on this machine: how long training waits for a checkpoint
that it writes itself, and for one that another process writes; and how long updates take while that process writes.

Each run is one process with one thread, so that a second core is free. Prints a table and writes a JSON file with every
sample. Give the machine nothing else to do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hvdtrain
from hvdtrain.bench.turns.turns import ONE_THREAD, InterleavedJobs, begin, finish, heading, progress
from hvdtrain.checkpoint.parts import Part
from hvdtrain.comm.turns import orders
from hvdtrain.core.flags import whole
from hvdtrain.record import stats

ARMS = {
    "torch": ("PyTorch", "torch", {}),
    "keras": ("Keras on TensorFlow", "keras", {"KERAS_BACKEND": "tensorflow"}),
    "keras-torch": ("Keras on PyTorch", "keras", {"KERAS_BACKEND": "torch"}),
}
WIDTH, LAYER_MB = 1000, 8.0  # of a layer: 4 MB, and as much of the optimizer's momentum
BATCH = 64
UNCOUNTED = 2  # rounds, in which memory is touched for the first time
SECONDS = ("at once", "later", "sealed", "alone", "beside")
Training = tuple[Callable[[], object], Callable[[], Mapping[str, Part]]]  # an update; what is saved


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain bench checkpoint`."""
    count = whole(1)
    add = parser.add_argument
    add("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM", help=f"(default: {' '.join(ARMS)})")
    add("--megabytes", type=count, default=400, metavar="N", help="size of weights and momentum (default: %(default)s)")
    add(
        "--rounds",
        type=count,
        default=7,
        metavar="N",
        help="rounds, each with one save in each way (default: %(default)s)",
    )
    add("--steps", type=count, default=10, metavar="N", help="updates without a save in a round (default: %(default)s)")
    add("--directory", type=Path, metavar="DIR", help="folder on the disk to write to (default: the temporary folder)")
    add("--out", type=Path, default=Path("bench-checkpoint.json"), metavar="FILE", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; returns 0."""
    result = begin("checkpoint", args, "a benchmark starts its own processes")
    result["arms"] = {}
    for number, arm in enumerate(args.arms, 1):
        progress(f"{number}/{len(args.arms)} {ARMS[arm][0]}")
        with tempfile.TemporaryDirectory(prefix="hvdtrain-checkpoint-", dir=args.directory) as folder:
            result["arms"][arm] = measure(args, arm, folder)
    return finish(args, result, report)


def measure(args: argparse.Namespace, arm: str, folder: str) -> dict[str, Any]:
    """The samples of one arm, and ratios of pairs."""
    _, framework, environment = ARMS[arm]
    layers = max(1, round(args.megabytes / LAYER_MB))
    command = [sys.executable, "-m", "hvdtrain.bench.checkpoint", framework, str(layers), str(args.steps), folder]
    with InterleavedJobs(os.environ | ONE_THREAD | environment) as jobs:
        jobs.start(arm, command, 1)
        rows = [jobs.turn(arm)[0] for _ in range(UNCOUNTED + args.rounds)]
    found: dict[str, Any] = {name: [row[name] for row in rows[UNCOUNTED:]] for name in SECONDS}
    found |= {name: rows[-1][name] for name in ("bytes", "image_bytes")}
    found["blocked_ratio"] = vars(stats.ratio_of_medians(found["later"], found["at once"]))
    found["step_ratio"] = vars(stats.ratio_of_medians(found["beside"], found["alone"]))
    return found


def report(result: Mapping[str, Any]) -> str:
    """The table of a result."""
    rows: list[tuple[str, ...]] = [
        ("training waits for", "a save at once", "one later", "ratio, 95 %", "which is there after", "an update",
         "beside it, 95 %", "in memory"),
        *(
            (
                ARMS[arm][0], *(stats.milliseconds(found[name]) for name in ("at once", "later")),
                str(stats.Interval(**found["blocked_ratio"])),
                *(stats.milliseconds(found[name]) for name in ("sealed", "alone")),
                str(stats.Interval(**found["step_ratio"])), f"{found['image_bytes'] / 1e6:.0f} MB",
            )
            for arm, found in result["arms"].items()
        ),
    ]  # fmt: skip
    sizes = sorted({round(found["bytes"] / 1e6) for found in result["arms"].values()})
    what = f"checkpoints of {' to '.join(map(str, sizes))} MB, one process, one thread"
    return f"{heading(what, result)}\n\n{stats.table(rows)}"


# ---- the process that trains and saves


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
    """Linear layers with momentum, in Keras."""
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
    """Returns the seconds that one call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def image_bytes() -> int:
    """Returns the bytes of checkpoints that this process and the one that writes hold in memory."""
    known = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    files = [path for path in known if os.path.islink(path) and os.readlink(path).startswith("/memfd:hvdtrain")]
    return sum(os.stat(path).st_blocks for path in files) * 512


def one_round(training: Training, ways: Mapping[str, hvdtrain.Checkpointer], steps: int, number: int) -> dict[str, Any]:
    """Saves once in each way, and updates beside the second and alone: seconds, and bytes."""
    update, state = training

    def save(way: str) -> tuple[float, Path]:
        begun = time.perf_counter()
        path = ways[way].save(state(), progress=hvdtrain.Progress(step=number))
        return time.perf_counter() - begun, path

    update()
    at_once, _ = save("at once")
    later, path = save("later")
    begun, beside = time.perf_counter(), list[float]()
    while not path.exists():
        beside.append(seconds(update))
    sealed = later + time.perf_counter() - begun
    ways["later"].wait()
    alone = [seconds(update) for _ in range(steps)]
    whole = beside[:-1] or beside  # in the last one it was finished
    row = (at_once, later, sealed, statistics.median(alone), statistics.median(whole))
    size = sum(file.stat().st_size for file in path.iterdir())
    return dict(zip(SECONDS, row, strict=True)) | {"bytes": size, "image_bytes": image_bytes()}


def main(framework: str, layers: str, steps: str, folder: str) -> None:
    """Serves rounds until the bench ends."""
    training = (torch_training if framework == "torch" else keras_training)(int(layers))
    ways = {way: hvdtrain.Checkpointer(Path(folder) / way, keep=1, best=None, asynchronous=way == "later")
            for way in SECONDS[:2]}  # fmt: skip
    for number, (_, connection) in enumerate(orders(0)):
        connection.send(one_round(training, ways, int(steps), number))


if __name__ == "__main__":
    main(*sys.argv[1:])
