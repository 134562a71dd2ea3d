"""Losses in which samples meet, with `prepare(whole=True)` on ranks, against plain Keras in one process.

usage: whole.py OUT.json [all]    "all": every loss, else every third one
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
MASK = (MADE.random((SAMPLES, 4)) < 0.3).astype("float64")
MASK[5:13] = 0
Y = np.column_stack([KIND, REAL, MASK]).astype("float64")
LOSSES: dict[str, Callable[[Any, Any], Any]] = {}


def loss(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Of y [n, 6] and outputs [n, 12]: two views of 4, a number, 3 logits."""
    LOSSES[function.__name__] = function
    return function


def parts(out: Any) -> tuple[Any, Any, Any, Any]:
    return out[:, :4], out[:, 4:8], out[:, 8], out[:, 9:]


def unit(values: Any) -> Any:
    return values / ops.sqrt(ops.sum(values * values, -1, keepdims=True) + 1e-9)


def kinds(y: Any) -> Any:
    return ops.cast(ops.equal(y[:, :1], ops.cast(ops.arange(KINDS), y.dtype)), y.dtype)


def same(y: Any) -> Any:
    return ops.cast(ops.equal(y[:, :1], ops.transpose(y[:, :1])), y.dtype)


def own(values: Any) -> Any:
    return ops.eye(ops.shape(values)[0], dtype=values.dtype)


def log_softmax(values: Any, axis: int = -1) -> Any:
    return values - ops.logsumexp(values, axis=axis, keepdims=True)


def bce(marks: Any, mask: Any) -> Any:
    return ops.maximum(marks, 0.0) - marks * mask + ops.log1p(ops.exp(-ops.abs(marks)))


def apart(values: Any) -> Any:
    return ops.sqrt(ops.sum((values[:, None] - values[None]) ** 2, -1) + 1e-6)


@loss
def info_nce(y: Any, out: Any) -> Any:
    a, b, _, _ = parts(out)
    logits = ops.matmul(unit(a), ops.transpose(unit(b))) / 0.2
    return -ops.mean(ops.sum(log_softmax(logits) * own(logits), 1))


@loss
def supervised_contrastive(y: Any, out: Any) -> Any:
    z = unit(parts(out)[0])
    logits = ops.matmul(z, ops.transpose(z)) / 0.3
    pairs = same(y) * (1 - own(logits))
    found = log_softmax(logits - 1e9 * own(logits))
    return -ops.mean(ops.sum(pairs * found, 1) / ops.maximum(ops.sum(pairs, 1), 1.0))


@loss
def barlow_twins(y: Any, out: Any) -> Any:
    a, b, _, _ = parts(out)
    a, b = ((v - ops.mean(v, 0)) / (ops.std(v, 0) + 1e-3) for v in (a, b))
    c = ops.matmul(ops.transpose(a), b) / ops.cast(ops.shape(a)[0], a.dtype)
    diagonal = ops.eye(4, dtype=c.dtype)
    return ops.sum(diagonal * (c - 1) ** 2) + 0.01 * ops.sum((1 - diagonal) * c**2)


@loss
def vicreg(y: Any, out: Any) -> Any:
    a, b, _, _ = parts(out)
    spread = [ops.mean(ops.relu(1 - ops.sqrt(ops.var(v, 0) + 1e-4))) for v in (a, b)]
    return ops.mean((a - b) ** 2) + spread[0] + spread[1]


@loss
def batch_hard_triplet(y: Any, out: Any) -> Any:
    d, s = apart(parts(out)[0]), same(y)
    return ops.mean(ops.relu(ops.max(d * s, 1) - ops.min(d + 1e3 * s, 1) + 0.5))


@loss
def pairwise_ranking(y: Any, out: Any) -> Any:
    number = parts(out)[2]
    larger = ops.cast(y[:, 1][:, None] > y[:, 1][None], y.dtype)
    return ops.sum(larger * ops.softplus(number[None] - number[:, None])) / ops.sum(larger)


@loss
def list_wise(y: Any, out: Any) -> Any:
    return -ops.sum(ops.softmax(y[:, 1], 0) * log_softmax(parts(out)[2], 0))


@loss
def survival(y: Any, out: Any) -> Any:
    later = ops.cast(y[:, 1][None] >= y[:, 1][:, None], y.dtype)
    seen, risk = ops.cast(y[:, 0] > 0, y.dtype), parts(out)[2]
    return -ops.sum(seen * (risk - ops.log(ops.sum(later * ops.exp(risk)[None], 1)))) / ops.sum(seen)


@loss
def distance_of_distributions(y: Any, out: Any) -> Any:
    return ops.mean(ops.abs(ops.sort(parts(out)[2]) - ops.sort(y[:, 1])))


@loss
def hardest_quarter(y: Any, out: Any) -> Any:
    each = ops.sort(-ops.sum(kinds(y) * log_softmax(parts(out)[3]), 1))
    place = ops.arange(ops.shape(each)[0])
    hard = ops.cast(place * 4 >= 3 * ops.shape(each)[0], each.dtype)
    return ops.sum(each * hard) / ops.sum(hard)


@loss
def dice(y: Any, out: Any) -> Any:
    p, m = ops.sigmoid(parts(out)[1]), y[:, 2:]
    return 1 - (2 * ops.sum(p * m) + 1) / (ops.sum(p) + ops.sum(m) + 1)


@loss
def tversky(y: Any, out: Any) -> Any:
    p, m = ops.sigmoid(parts(out)[1]), y[:, 2:]
    met = ops.sum(p * m)
    return 1 - met / (met + 0.3 * ops.sum(p * (1 - m)) + 0.7 * ops.sum((1 - p) * m) + 1e-6)


@loss
def soft_f1_by_class(y: Any, out: Any) -> Any:
    p, k = ops.softmax(parts(out)[3]), kinds(y)
    return ops.mean(1 - 2 * ops.sum(p * k, 0) / (ops.sum(p, 0) + ops.sum(k, 0) + 1e-8))


@loss
def focal_over_positives(y: Any, out: Any) -> Any:
    marks, m = parts(out)[1], y[:, 2:]
    return ops.sum((ops.sigmoid(marks) - m) ** 2 * bce(marks, m)) / ops.maximum(ops.sum(m), 1.0)


@loss
def two_normalisers(y: Any, out: Any) -> Any:
    m = y[:, 2:]
    boxes = ops.sum(ops.abs(parts(out)[1] - 0.5) * m) / ops.maximum(ops.sum(m), 1.0)
    return -ops.mean(ops.sum(kinds(y) * log_softmax(parts(out)[3]), 1)) + 5 * boxes


@loss
def correlation(y: Any, out: Any) -> Any:
    p, t = parts(out)[2], y[:, 1]
    p, t = p - ops.mean(p), t - ops.mean(t)
    return 1 - ops.sum(p * t) / ops.sqrt(ops.sum(p * p) * ops.sum(t * t) + 1e-8)


@loss
def concordance(y: Any, out: Any) -> Any:
    p, t = parts(out)[2], y[:, 1]
    both = ops.mean((p - ops.mean(p)) * (t - ops.mean(t)))
    return 1 - 2 * both / (ops.var(p) + ops.var(t) + (ops.mean(p) - ops.mean(t)) ** 2)


@loss
def root_of_the_mean(y: Any, out: Any) -> Any:
    return ops.sqrt(ops.mean((parts(out)[2] - y[:, 1]) ** 2))


@loss
def expert_balance(y: Any, out: Any) -> Any:
    p = ops.softmax(parts(out)[3])
    share = ops.mean(ops.cast(ops.equal(p, ops.max(p, 1, keepdims=True)), p.dtype), 0)
    return KINDS * ops.sum(ops.stop_gradient(share) * ops.mean(p, 0)) - ops.mean(kinds(y) * ops.log(p))


@loss
def mutual_information(y: Any, out: Any) -> Any:
    p = ops.softmax(parts(out)[3])
    mean = ops.mean(p, 0)
    return ops.sum(mean * ops.log(mean)) - ops.mean(ops.sum(p * ops.log(p), 1))


@loss
def a_bare_sum(y: Any, out: Any) -> Any:
    return 0.02 * ops.sum((parts(out)[2] - y[:, 1]) ** 2)


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
    for place, (name, function) in enumerate(LOSSES.items()):
        if place % 3 and "all" not in sys.argv:
            continue
        plain = model_for(function)
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
