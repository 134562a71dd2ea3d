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
from hvdtrain.core import flags, startup
from hvdtrain.core.launchers import Detected
from hvdtrain.core.stats import rotated
from hvdtrain.datasets import load_mnist
from hvdtrain.keras_mnist import network

PROGRAM = "hvdtrain.bench.keras_job"
SKIPPED_STEPS = 3  # of each block: the input queue fills, and the checks at the start of fit have their say


def measure(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds a step of every block, by clock and arm; the arms take turns, and who begins changes each time.

    Clocks: "wall", and "cpu" (of all threads of this process), which a busy machine disturbs less.
    """
    import numpy as np

    images = load_mnist("digits")
    wanted = np.arange((args.steps + SKIPPED_STEPS) * args.per_rank_batch * hvdtrain.current().size)  # type: ignore[union-attr]
    x = images.x_train[..., None].take(wanted, axis=0, mode="wrap")
    y = images.y_train.take(wanted, mode="wrap")
    arms: dict[str, Any] = {"prepared": prepared_arm(args, x, y)}
    if args.task == "overhead":
        arms["plain"] = plain_arm(args, x, y)
    seconds: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in arms} for clock in ("wall", "cpu")}
    for block in range(args.blocks + 1):
        for name in rotated(arms, block):
            wall_s, cpu_s = arms[name]()
            if block > 0:  # the first one traces and compiles
                seconds["wall"][name].append(wall_s)
                seconds["cpu"][name].append(cpu_s)
    return seconds


def plain_arm(args: argparse.Namespace, x: Any, y: Any) -> Any:
    """A block of plain Keras, as its documentation writes it."""
    model, timer = compiled(), make_timer()

    def block() -> tuple[float, float]:
        model.fit(x, y, batch_size=args.per_rank_batch, epochs=1, callbacks=[timer], verbose=0)
        return timer.seconds_per_step()

    return block


def prepared_arm(args: argparse.Namespace, x: Any, y: Any) -> Any:
    """The same block with hvdtrain, as its README writes it."""
    import hvdtrain.keras as hvk

    model, timer = compiled(), make_timer()
    hvk.prepare(model)
    data = hvk.batches(x, y, args.per_rank_batch)

    def block() -> tuple[float, float]:
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
            self.ends: list[tuple[float, float]] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append((time.perf_counter(), time.process_time()))

        def seconds_per_step(self) -> tuple[float, float]:
            """Wall and CPU seconds of a step, mean over the block."""
            first, last = self.ends[SKIPPED_STEPS - 1], self.ends[-1]
            steps = len(self.ends) - SKIPPED_STEPS
            return (last[0] - first[0]) / steps, (last[1] - first[1]) / steps

    return Timer()


def main() -> int:
    """Pins this rank to a core of its own, joins the others, measures, writes ``rank-N.json``."""

    def work(detected: Detected) -> None:
        parser = flags.Parser(PROGRAM, description=(__doc__ or ""), epilog="")
        parser.add_argument("task", choices=["overhead", "scaling"])
        for flag in ("--per-rank-batch", "--steps", "--blocks"):
            parser.add_argument(flag, type=flags.whole(1), required=True)
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
