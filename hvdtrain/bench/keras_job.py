"""One rank of `hvdtrain bench train --framework keras`: measures blocks of updates, turn by turn."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import hvdtrain
from hvdtrain.bench.torch_job import CLASSES, TOY, peak_memory
from hvdtrain.bench.turns.turns import pin
from hvdtrain.comm.turns import orders
from hvdtrain.core import flags
from hvdtrain.core.launchers import Detected
from hvdtrain.datasets import load_mnist
from hvdtrain.keras_mnist import network
from hvdtrain.world import startup

PROGRAM = "hvdtrain.bench.keras_job"
# models of `torch_job`, too: by torchvision's name, Keras' own
APPLICATIONS = {
    "resnet50": "ResNet50", "mobilenet_v2": "MobileNetV2", "vgg16": "VGG16", "densenet121": "DenseNet121", TOY: "",
}  # fmt: skip
Block = Callable[[], tuple[float, float]]  # wall and CPU seconds of a step
SKIPPED_STEPS = 3  # of each block: the input queue fills, and the checks at the start of fit have their say


def pictures(args: argparse.Namespace, arm: str) -> tuple[Any, Any]:
    """Those of a block, and their labels: of all ranks where they are dealt out, else a rank's own."""
    import numpy as np

    count = (args.steps + SKIPPED_STEPS) * args.per_rank_batch
    if arm == "prepared":
        count *= hvdtrain.current().size  # type: ignore[union-attr]
    if args.model in APPLICATIONS:
        draw = np.random.Generator(np.random.PCG64(0))
        shape = (count, args.pixels, args.pixels, 3)
        return draw.standard_normal(shape, np.float32), draw.integers(0, CLASSES, count)
    images = load_mnist("digits")
    wanted = np.arange(count)
    return images.x_train[..., None].take(wanted, axis=0, mode="wrap"), images.y_train.take(wanted, mode="wrap")


def plain_arm(args: argparse.Namespace, x: Any, y: Any) -> Block:
    """A block of plain Keras, as its documentation writes it."""
    model, timer = compiled(args), make_timer()

    def block() -> tuple[float, float]:
        model.fit(x, y, batch_size=args.per_rank_batch, epochs=1, callbacks=[timer], verbose=0)
        return timer.seconds_per_step()

    return block


def prepared_arm(args: argparse.Namespace, x: Any, y: Any) -> Block:
    """The same block with hvdtrain, as its README writes it."""
    import hvdtrain.keras as hvk

    model, timer = compiled(args), make_timer()
    data = hvk.loader((x, y), args.per_rank_batch)
    hvk.prepare(model, data)

    def block() -> tuple[float, float]:
        model.fit(data, epochs=1, callbacks=[*hvk.callbacks(model), timer], verbose=0)
        return timer.seconds_per_step()

    return block


def compiled(args: argparse.Namespace) -> Any:
    """The network of the Keras MNIST program, with its optimizer and loss; or one of Keras' own."""
    import keras

    if args.model in APPLICATIONS:
        model = _application(args.model, (args.pixels, args.pixels, 3))
        model.compile(optimizer=keras.optimizers.SGD(0.01, momentum=0.9), loss="sparse_categorical_crossentropy")
        return model
    model = network()
    model.compile(
        optimizer=keras.optimizers.Adadelta(learning_rate=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def _application(name: str, shape: tuple[int, int, int]) -> Any:
    import keras

    if name != TOY:
        return getattr(keras.applications, APPLICATIONS[name])(weights=None, input_shape=shape, classes=CLASSES)
    its = keras.layers
    return keras.Sequential([
        its.Input(shape), its.Conv2D(8, 3), its.BatchNormalization(), its.ReLU(), its.GlobalAveragePooling2D(),
        its.Dense(CLASSES, "softmax"),
    ])  # fmt: skip


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


ARMS = {"prepared": prepared_arm, "plain": plain_arm}


def main() -> int:
    """Pins this rank to a core of its own, joins the others, answers orders until the bench ends."""

    def work(detected: Detected) -> None:
        parser = flags.Parser(PROGRAM, description=(__doc__ or ""), epilog="")
        for flag in ("--per-rank-batch", "--steps"):
            parser.add_argument(flag, type=flags.whole(1), required=True)
        parser.add_argument("--backend", required=True)
        parser.add_argument("--model", choices=["mnist", *APPLICATIONS], default="mnist")
        parser.add_argument("--pixels", type=flags.whole(1), default=64, help="side of a picture, but of mnist")
        args = parser.parse_args()
        pin(detected.local_rank)
        os.environ["KERAS_BACKEND"] = args.backend
        needed = startup.keras_modules(args.backend, detected)
        startup.find_modules(needed)
        startup.import_modules(needed)
        with hvdtrain.init("keras", device="cpu") as world:
            block_of = functools.cache(lambda arm: ARMS[arm](args, *pictures(args, arm)))
            for order, connection in orders(world.rank):
                wall_s, cpu_s = block_of(order["arm"])()
                connection.send({"wall": wall_s, "cpu": cpu_s, "memory": peak_memory()})

    return startup.run_program(PROGRAM, work)


if __name__ == "__main__":
    sys.exit(main())
