"""Two ranks in a fit, of which rank 1 does not come to the fourth update; usage: hang.py WAY.

The line where it is named to be ends in "# here".
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import keras
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "torch"))
import beacon

import hvdtrain
import hvdtrain.keras as hvk
from hvdtrain import World

X, Y = np.ones((16, 3), "float32"), np.zeros((16, 1), "float32")


class Data(keras.utils.PyDataset):
    """Whose next batch never comes, once it hangs."""

    hangs = False

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if self.hangs:
            beacon.parts()
            while True:  # here
                time.sleep(0.05)  # here
        return X[:2], Y[:2]


class Hangs(keras.callbacks.Callback):
    def __init__(self, data: Data) -> None:
        super().__init__()
        self._data = data

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self._data.hangs = batch == 1


class Stays(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch == 2:
            beacon.parts()
            while True:  # here
                pass  # here


def main() -> None:
    (way,) = sys.argv[1:]
    beacon.start()
    with hvdtrain.init("keras", device="cpu") as world:
        fit(world, way)


def fit(world: World, way: str) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    model = hvk.prepare(model, verify=False)
    data = Data()
    mine = [Stays() if way == "callback" else Hangs(data)] if world.rank == 1 else []
    model.fit(hvk.loader(data, world=world), callbacks=[*hvk.callbacks(model), *mine], verbose=0, epochs=2)


if __name__ == "__main__":
    main()
