"""Models are prepared, trained and dropped: nothing of them may be left, as without hvdtrain. usage: leaks.py"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from typing import Any

import keras
import numpy as np
import psutil

import hvdtrain

world = hvdtrain.init("keras", seed=5)
import hvdtrain.keras as hvk  # noqa: E402

MODELS, WARM_UP, WIDTH = 20, 8, 1024  # 4 MiB of weights each
MOST_MIB = 20


def fold() -> list[weakref.ref[Any]]:
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH), keras.layers.BatchNormalization()])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    hvk.prepare(model, verify=False)
    data = hvk.batches(np.zeros((8, WIDTH), "float32"), np.zeros((8, WIDTH), "float32"), 8 // world.size)
    model.fit(data, verbose=0, callbacks=hvk.callbacks(model, plan=data.plan))
    return [weakref.ref(model), weakref.ref(model.optimizer), weakref.ref(data)]


if __name__ == "__main__":
    before: tuple[int, float] = 0, 0.0
    dead: list[weakref.ref[Any]] = []
    for number in range(MODELS):
        dead += fold()
        keras.backend.clear_session()  # Keras' own rule
        gc.collect()
        if number + 1 == WARM_UP:
            before = threading.active_count(), psutil.Process().memory_info().rss / 2**20
    alive = [type(thing()).__name__ for thing in dead if thing() is not None]
    grown = psutil.Process().memory_info().rss / 2**20 - before[1]
    print(f"alive {alive}, threads {before[0]} -> {threading.active_count()}, {grown:+.1f} MiB", flush=True)
    wrong = bool(alive or threading.active_count() > before[0] or grown > MOST_MIB)
    failed = any(world.gather(wrong))
    world.comm.shutdown()
    sys.exit(3 if failed else 0)
