"""One rank of ``hvdtrain bench train --framework keras``: measures blocks of updates and writes them to a file."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import hvdtrain
from hvdtrain import startup
from hvdtrain.datasets import load_mnist
from hvdtrain.keras_mnist import network
from hvdtrain.launchers import Detected

PROGRAM = "hvdtrain.bench.keras_job"
SKIPPED_STEPS = 3  # of each block: the input queue fills, and the checks at the start of fit have their say


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds a step of every block, by arm; the arms take turns, and who begins changes each time."""
    import numpy as np

    images = load_mnist("digits")
    wanted = np.arange((args.steps + SKIPPED_STEPS) * args.per_rank_batch * hvdtrain.current().size)  # type: ignore[union-attr]
    x = images.x_train[..., None].take(wanted, axis=0, mode="wrap")
    y = images.y_train.take(wanted, mode="wrap")
    arms: dict[str, Any] = {"prepared": prepared_arm(args, x, y)}
    if args.task == "overhead":
        arms["plain"] = plain_arm(args, x, y)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for block in range(args.blocks + 1):
        for name in sorted(arms, reverse=bool(block % 2)):
            took = arms[name]()
            if block > 0:  # the first one traces and compiles
                seconds[name].append(took)
    return seconds


def plain_arm(args: argparse.Namespace, x: Any, y: Any) -> Any:
    """A block of plain Keras, as its documentation writes it."""
    model, timer = compiled(), make_timer()

    def block() -> float:
        model.fit(x, y, batch_size=args.per_rank_batch, epochs=1, callbacks=[timer], verbose=0)
        return timer.seconds_per_step()

    return block


def prepared_arm(args: argparse.Namespace, x: Any, y: Any) -> Any:
    """The same block with hvdtrain, as its README writes it."""
    import hvdtrain.keras as hvk

    model, timer = compiled(), make_timer()
    hvk.prepare(model)
    data = hvk.batches(x, y, args.per_rank_batch)

    def block() -> float:
        model.fit(data, epochs=1, callbacks=[*hvk.callbacks(model, plan=data.plan), timer], verbose=0)
        return timer.seconds_per_step()

    return block


def compiled() -> Any:
    """The network of the Keras MNIST program, with its optimizer and loss."""
    import keras

    model = network()
    model.compile(
        optimizer=keras.optimizers.Adadelta(learning_rate=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def make_timer() -> Any:
    """A callback that notes when each step ends; both arms have one."""
    import keras

    class Timer(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())

        def seconds_per_step(self) -> float:
            counted = self.ends[SKIPPED_STEPS - 1 :]
            return (counted[-1] - counted[0]) / (len(counted) - 1)

    return Timer()


def main() -> int:
    """Pins this rank to a core of its own, joins the others, measures, writes ``rank-N.json``."""

    def work(detected: Detected) -> None:
        parser = startup.Parser(PROGRAM, description=(__doc__ or ""), epilog="")
        parser.add_argument("task", choices=["overhead", "scaling"])
        for flag in ("--per-rank-batch", "--steps", "--blocks"):
            parser.add_argument(flag, type=startup.whole(1), required=True)
        parser.add_argument("--backend", required=True)
        parser.add_argument("--out", type=Path, required=True)
        args = parser.parse_args()
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[detected.local_rank % len(cores)]})
        os.environ["KERAS_BACKEND"] = args.backend
        needed = startup.keras_modules(args.backend, detected)
        startup.find_modules(needed)
        startup.import_modules(needed)
        with hvdtrain.init("keras", device="cpu") as world:
            seconds = measure(args)
            (args.out / f"rank-{world.rank}.json").write_text(json.dumps(seconds))

    return startup.run_program(PROGRAM, work)


if __name__ == "__main__":
    sys.exit(main())
