"""Models are prepared, trained and dropped: nothing of them may be left but what plain Keras leaves.

Keras on TensorFlow leaves about 12 MiB a model here by itself: its functions of Python stay registered.
"""

from __future__ import annotations

import ctypes
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

MODELS, WARM_UP, WIDTH = 10, 12, 1024  # 4 MiB of weights each
MOST_MIB = 20


class Plain(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return np.zeros((8, WIDTH), "float32"), np.zeros((8, WIDTH), "float32")


def fold(prepared: bool) -> list[weakref.ref[Any]]:
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH), keras.layers.BatchNormalization()])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    if prepared:
        hvk.prepare(model, verify=False)
        data = hvk.loader((np.zeros((8, WIDTH), "float32"),) * 2, 8 // world.size)
        model.fit(data, verbose=0, callbacks=hvk.callbacks(model))
    else:
        model.fit(Plain(), verbose=0)
    return [weakref.ref(model), weakref.ref(model.optimizer)]


def resident_mib() -> float:
    """What is held; not what the allocator keeps of what was freed."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return psutil.Process().memory_info().rss / 2**20


def grown(prepared: bool, models: int) -> tuple[float, list[str]]:
    """MiB that so many models leave, and which are still alive."""
    before, dead = resident_mib(), []
    for _ in range(models):
        dead += fold(prepared)
        keras.backend.clear_session()  # Keras' own rule
        gc.collect()
    alive = [type(thing()).__name__ for thing in dead if thing() is not None]
    return resident_mib() - before, alive


if __name__ == "__main__":
    with world:
        for warm in (False, True):
            grown(warm, WARM_UP)
        threads = threading.active_count()
        plain, _ = grown(False, MODELS)
        own, alive = grown(True, MODELS)
        now = threading.active_count()
        print(f"alive {alive}, threads {threads} -> {now}, plain {plain:.1f}, own {own:.1f} MiB", flush=True)
        wrong = bool(alive or now > threads or own - plain > MOST_MIB)
        failed = any(world.gather(wrong))
    sys.exit(3 if failed else 0)
