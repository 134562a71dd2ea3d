"""Two ranks that are not in step, on a backend of Keras; usage: out_of_step.py WAY... Rank 1 is the one that strays.

One way ends the program as it does. Several are ways that raise: each prints a line of JSON. The lines where ranks are
named to be end in "# here".
"""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "torch"))
import beacon

import hvdtrain
import hvdtrain.keras as hvk
from hvdtrain import World

X, Y = np.ones((16, 3), "float32"), np.zeros((16, 1), "float32")


def prepared() -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    return hvk.prepare(model, verify=False)


def evaluate_on_rank_0(world: World) -> None:
    model = prepared()
    if world.is_main:
        beacon.parts()
        hvk.evaluate(model, (X, Y), per_rank_batch=4)  # here
    beacon.parts()
    model.fit(hvk.loader((X, Y), 4), callbacks=hvk.callbacks(model), verbose=0)  # here


def evaluate_in_on_main(world: World) -> None:
    model = prepared()
    beacon.parts()
    world.on_main(hvk.evaluate, model, (X, Y), per_rank_batch=4)  # here


def callbacks_on_rank_0(world: World) -> None:
    model = prepared()
    mine = hvk.callbacks(model) if world.is_main else []
    beacon.parts()
    model.fit(hvk.loader((X, Y), 4), callbacks=mine, verbose=0)  # here


def gather_in_a_callback(world: World) -> None:
    """Before the third batch of the epoch, which rank 1 goes on to."""

    class Asks(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
            if batch == 2:
                beacon.parts()
                world.gather(batch)  # here

    model = prepared()
    mine = [Asks()] if world.is_main else []
    model.fit(hvk.loader((X, Y), 2), callbacks=[*hvk.callbacks(model), *mine], verbose=0)  # here


def all_reduces_swapped(world: World) -> None:
    """Called eagerly, TensorFlow's operations ignore their names: each rank took the other's sum for its own."""
    from hvdtrain.keras.state import replicas

    part = [keras.Variable(np.ones(2, "float32")), keras.Variable(np.full(2, 5.0, "float32"))]
    beacon.parts()
    if world.is_main:
        replicas.average(part[:1], world)  # here
        replicas.average(part[1:], world)
    else:
        replicas.average(part[1:], world)  # here
        replicas.average(part[:1], world)
    print("sums", [variable.numpy().tolist() for variable in part], flush=True)


def main() -> None:
    beacon.start()
    world = hvdtrain.init("keras", device="cpu")
    ways = sys.argv[1:]
    if len(ways) == 1:
        globals()[ways[0]](world)
    for way in ways if len(ways) > 1 else ():
        beacon.report(way, lambda way=way: globals()[way](world))


if __name__ == "__main__":
    main()
