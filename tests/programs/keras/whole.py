"""Losses in which samples meet, with `prepare(whole=True)` on ranks, against plain Keras in one process.

usage: whole.py OUT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

import hvdtrain
import hvdtrain.keras as hvk

UPDATE, SAMPLES, WIDTH, KINDS = 18, 43, 5, 3  # the last update has 7 samples: with 3 ranks some have fewer
MADE = np.random.default_rng(5)
X = MADE.normal(size=(SAMPLES, WIDTH))
KIND, REAL = MADE.integers(0, KINDS, SAMPLES), MADE.normal(size=SAMPLES)
Y = np.column_stack([KIND, REAL]).astype("float64")
LOSSES: dict[str, Callable[[Any, Any], Any]] = {}


def loss(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Of y [n, 2] and outputs [n, 12]: two views of 4, a number, 3 logits."""
    LOSSES[function.__name__] = function
    return function


def parts(out: Any) -> tuple[Any, Any, Any, Any]:
    return out[:, :4], out[:, 4:8], out[:, 8], out[:, 9:]


def unit(values: Any) -> Any:
    return values / ops.sqrt(ops.sum(values * values, -1, keepdims=True) + 1e-9)


def kinds(y: Any) -> Any:
    return ops.cast(ops.equal(y[:, :1], ops.cast(ops.arange(KINDS), y.dtype)), y.dtype)


def own(values: Any) -> Any:
    return ops.eye(ops.shape(values)[0], dtype=values.dtype)


def log_softmax(values: Any, axis: int = -1) -> Any:
    return values - ops.logsumexp(values, axis=axis, keepdims=True)


@loss
def info_nce(y: Any, out: Any) -> Any:
    a, b, _, _ = parts(out)
    logits = ops.matmul(unit(a), ops.transpose(unit(b))) / 0.2
    return -ops.mean(ops.sum(log_softmax(logits) * own(logits), 1))


@loss
def hardest_quarter(y: Any, out: Any) -> Any:
    each = ops.sort(-ops.sum(kinds(y) * log_softmax(parts(out)[3]), 1))
    place = ops.arange(ops.shape(each)[0])
    hard = ops.cast(place * 4 >= 3 * ops.shape(each)[0], each.dtype)
    return ops.sum(each * hard) / ops.sum(hard)


@loss
def soft_f1_by_class(y: Any, out: Any) -> Any:
    p, k = ops.softmax(parts(out)[3]), kinds(y)
    return ops.mean(1 - 2 * ops.sum(p * k, 0) / (ops.sum(p, 0) + ops.sum(k, 0) + 1e-8))


def model_for(function: Callable[[Any, Any], Any]) -> keras.Model:
    keras.utils.set_random_seed(3)
    given = keras.Input((WIDTH,))
    hidden = keras.layers.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2(0.01))(given)
    model = keras.Model(given, keras.layers.Dense(12)(hidden))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss=function)
    return model


def main() -> None:
    keras.config.set_floatx("float64")
    world = hvdtrain.init("keras")
    report: dict[str, Any] = {}
    for name, function in LOSSES.items():
        plain = model_for(function)
        plain.run_eagerly = True  # tracing takes longer than these steps
        wanted = plain.fit(X, Y, batch_size=UPDATE, epochs=2, shuffle=False, verbose=0).history["loss"]
        right = plain.evaluate(X, Y, batch_size=UPDATE, verbose=0)
        model = model_for(function)
        data = hvk.loader((X, Y), UPDATE // world.size, shuffle=False)
        hvk.prepare(model, data, whole=True)
        found = model.fit(data, epochs=2, verbose=0, callbacks=hvk.callbacks(model)).history["loss"]
        weights = zip(model.get_weights(), plain.get_weights(), strict=True)
        evaluated = hvk.evaluate(model, (X, Y), per_rank_batch=UPDATE // world.size)["loss"]
        report[name] = [
            max(float(np.abs(a - b).max()) for a, b in weights),
            max(abs(a - b) for a, b in zip(found, wanted, strict=True)), abs(evaluated - right),
        ]  # fmt: skip
    if world.is_main:
        Path(sys.argv[1]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
