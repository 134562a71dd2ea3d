"""What the rank programs of the Keras tests share: small models, data, and reports the tests can read."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import dtypes

# each clear_session() looks for garbage in all there is: without what the imports made, a quarter of the time is saved
gc.freeze()

L = keras.layers
BACKEND = keras.backend.backend()


class Block:
    """Makes imports of the named packages fail, as on a machine that lacks them."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"{name} is blocked in this test", name=name)


def block(*names: str) -> None:
    sys.meta_path.insert(0, Block(*names))


def images(samples: int = 64) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    return rng.normal(size=(samples, 6, 6, 1)), rng.integers(0, 4, samples)


def tokens(samples: int = 64) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(8)
    return rng.integers(0, 20, (samples, 5)), rng.integers(0, 4, samples)


def in_float64(*, stock: bool = False) -> None:
    """Has Keras compute in float64.

    Args:
        stock: on PyTorch it casts many results to float32, whatever it is given. Otherwise it is kept from that.
    """
    keras.config.set_floatx("float64")
    if BACKEND == "torch":
        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float32" if stock else "float64"


def cnn(with_input: bool = True) -> keras.Model:
    layers = [L.Conv2D(3, 3, activation="tanh"), L.Flatten(), L.Dense(4)]
    return keras.Sequential([L.Input((6, 6, 1)), *layers] if with_input else layers)


def text() -> keras.Model:
    return keras.Sequential([L.Input((5,), dtype="int32"), L.Embedding(20, 6), L.GlobalAveragePooling1D(), L.Dense(4)])


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def numpy_of(variable: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(variable))


def weights_of(model: keras.Model) -> list[np.ndarray]:
    return [numpy_of(variable) for variable in model.weights]


def apart(a: Any, b: Any) -> float:
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in zip(a, b, strict=True))


def report(folder: str | Path, name: str, rank: int, data: dict[str, Any]) -> None:
    Path(folder, f"{name}.rank{rank}.json").write_text(json.dumps(data, default=str))


class Rates(keras.callbacks.Callback):
    """The learning rate at the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(round(float(self.model.optimizer.learning_rate.numpy()), 6))
