"""Two ranks in a fit, of which rank 1 does not come to the fourth update: its callback never returns.

The line where it is named to be ends in "# here".
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


class Stays(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch == 2:
            beacon.parts()
            while True:  # here
                pass  # here


def main() -> None:
    beacon.start()
    with hvdtrain.init("keras", device="cpu") as world:
        fit(world)


def fit(world: World) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    model = hvk.prepare(model, verify=False)
    mine = [Stays()] if world.rank == 1 else []
    model.fit(hvk.loader((X, Y), 2), callbacks=[*hvk.callbacks(model), *mine], verbose=0, epochs=2)


if __name__ == "__main__":
    main()
