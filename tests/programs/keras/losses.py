"""Losses that divide by samples, labels, masked steps, weights or nothing: each trained a few steps in float64.

usage: losses.py OUT.npz [case ...]     one process: plain Keras, nothing of hvdtrain; N ranks: an N-th of each batch

OUT.npz holds the weights, OUT.npz.json what `fit` logged, or the error. Samples are unlike in what losses divide by:
the ranks' halves of a global batch hold different numbers of labels, steps and weight.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from common import BACKEND, L, block, dense, numpy_of, weights_of

RANKED = int(os.environ.get("HOROVOD_SIZE", "1")) > 1
BATCH, EPOCHS, ACCUMULATE = 12, 2, 3
SAMPLES = 2 * BATCH + 1  # a tail of one: a rank has none
O = keras.optimizers  # noqa: E741
RNG = np.random.default_rng(5)
STEPS = 6
X = RNG.normal(size=(SAMPLES, 5))
LABEL = RNG.integers(0, 3, SAMPLES)
# lengths that grow within every global batch, so that the ranks' parts are unlike
LENGTH = 1 + (np.arange(SAMPLES) % BATCH) * STEPS // BATCH
TOKENS = np.where(np.arange(STEPS) < LENGTH[:, None], RNG.integers(1, 9, (SAMPLES, STEPS)), 0)
TAGS = RNG.integers(0, 3, (SAMPLES, STEPS))
IGNORED = np.where(np.arange(STEPS) < LENGTH[:, None], TAGS, -1)
ONE_RANK_IGNORED = np.where(np.arange(SAMPLES)[:, None] % BATCH < BATCH // 2, -1, TAGS)
WEIGHT = np.linspace(0.1, 3.0, SAMPLES) * (1 + np.arange(SAMPLES) % BATCH)
HALF_ZERO = np.where(np.arange(SAMPLES) % BATCH < BATCH // 2, 0.0, WEIGHT)
PICTURES = RNG.normal(size=(SAMPLES, 4, 4, 1))
SHAPES = (PICTURES > 0.4).astype("float64")


def net() -> keras.Model:
    return keras.Sequential([L.Input((5,)), dense(4, activation="tanh"), dense(3)])


def tagger(masked: bool = False) -> keras.Model:
    return keras.Sequential([L.Input((STEPS,), dtype="int32"), L.Embedding(9, 4, mask_zero=masked), wide(3)])


def wide(units: int) -> keras.layers.Layer:
    """A dense layer over steps, which keeps masks; in float64 on torch too."""
    layer = L.EinsumDense("bti,ij->btj", output_shape=(None, units), bias_axes="j")
    layer.supports_masking = True
    return layer


def recurrent() -> keras.Model:
    return keras.Sequential([L.Input((STEPS, 1)), L.Masking(0.0), L.LSTM(3, return_sequences=True), wide(3)])


def segmenter() -> keras.Model:
    return keras.Sequential([L.Input((4, 4, 1)), L.Conv2D(2, 3, padding="same"), L.Conv2D(1, 1, activation="sigmoid")])


def two_outputs() -> keras.Model:
    tokens = L.Input((STEPS,), dtype="int32")
    inner = L.Embedding(9, 4)(tokens)
    return keras.Model(tokens, {"tags": wide(3)(inner), "label": dense(3)(L.GlobalAveragePooling1D()(inner))})


class Balance(keras.layers.Layer):
    """Of a mixture of experts: how even the batch as a whole is spread, asked in training only."""

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.add_loss(keras.ops.sum(keras.ops.square(keras.ops.mean(keras.ops.softmax(x), axis=0))))
        return x


class OwnBatchNorm(keras.layers.Layer):
    def call(self, x: Any, training: bool = False) -> Any:
        return x - keras.ops.mean(x, axis=0) if training else x


def with_layer(layer: keras.layers.Layer) -> keras.Model:
    return keras.Sequential([L.Input((5,)), dense(4), layer, dense(3)])


def contrast(y: Any, p: Any) -> Any:
    """Each sample against all others of the batch."""
    return keras.ops.logsumexp(keras.ops.matmul(p, keras.ops.transpose(p)), axis=1)


def ce(**arguments: Any) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


def by_what_counts(y: Any, p: Any) -> Any:
    """One value a sample, which all divide by what counts in the batch: everything, in the first one."""
    counts = y[:, 3]
    return keras.ops.mean(keras.ops.square(y[:, :3] - p), -1) * counts / keras.ops.mean(counts)


# model, loss, x, y, then compile arguments, weights of samples or classes; on TensorFlow tracing takes longer than the
# steps: few cases need it
CASES: dict[str, dict[str, Any]] = {
    "ignore_class": {"model": tagger, "loss": lambda: ce(ignore_class=-1), "x": TOKENS, "y": IGNORED},
    "one_rank_ignored": {
        "model": tagger, "loss": lambda: ce(ignore_class=-1), "x": TOKENS, "y": ONE_RANK_IGNORED, "traced": True,
    },
    "mask_zero": {"model": lambda: tagger(True), "loss": ce, "x": TOKENS, "y": TAGS, "traced": True},
    "masking_lstm": {"model": recurrent, "loss": ce, "x": TOKENS[..., None].astype("float64"), "y": TAGS},
    "weights_zero_on_a_rank": {
        "model": net, "loss": ce, "y": LABEL, "sample_weight": HALF_ZERO, "weighted": True, "traced": True,
    },
    "mean_of_weights": {
        "model": net, "loss": lambda: ce(reduction="mean_with_sample_weight"), "y": LABEL, "sample_weight": WEIGHT,
    },
    "class_weight": {"model": net, "loss": ce, "y": LABEL, "class_weight": {0: 1.0, 1: 5.0, 2: 0.5}},
    "sum": {"model": net, "loss": lambda: ce(reduction="sum"), "y": LABEL},
    "two_outputs": {
        "model": two_outputs, "loss": lambda: {"tags": ce(ignore_class=-1), "label": ce()}, "x": TOKENS,
        "y": {"tags": IGNORED, "label": LABEL}, "traced": True,
        "compile": {"loss_weights": {"tags": 0.7, "label": 2.0}},
    },
    # refused
    "none": {"model": net, "loss": lambda: ce(reduction=None), "y": LABEL},
    "dice_of_the_batch": {"model": segmenter, "loss": keras.losses.Dice, "x": PICTURES, "y": SHAPES},
    "balance_in_training": {"model": lambda: with_layer(Balance()), "loss": ce, "y": LABEL},
    "added_to_the_whole": {
        "model": lambda: with_layer(Balance()), "loss": ce, "y": LABEL, "prepare": {"whole": True},
    },
    "batchnorm_of_ones_own": {"model": lambda: with_layer(OwnBatchNorm()), "loss": ce, "y": LABEL},
    "divides_otherwise_later": {
        "model": net, "loss": lambda: by_what_counts,
        "y": np.concatenate([np.eye(3)[LABEL], np.where(np.arange(SAMPLES) < BATCH, 1, 1 + LABEL)[:, None]], 1),
    },
    "contrast_of_single_samples": {"model": net, "loss": lambda: contrast, "y": LABEL, "each": 1},
}  # fmt: skip


def train(case: dict[str, Any]) -> tuple[keras.Model, dict[str, list[float]]]:
    x, y = case.get("x", X), case["y"]
    weights = {key: case[key] for key in ("sample_weight", "class_weight") if key in case}
    model = case["model"]()
    model.compile(
        O.SGD(0.5, gradient_accumulation_steps=ACCUMULATE), case["loss"](),
        weighted_metrics=["accuracy"] if case.get("weighted") else None, run_eagerly=not case.get("traced"),
        **case.get("compile", {}),
    )  # fmt: skip
    if not RANKED:
        history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, **weights)
        return model, history.history
    import hvdtrain.keras as hvk

    hvk.prepare(model, **case.get("prepare", {}))
    size = int(os.environ["HOROVOD_SIZE"])
    dealt = (x, y, weights["sample_weight"]) if "sample_weight" in weights else (x, y)
    data = hvk.loader(dealt, case.get("each", BATCH // size), shuffle=False, class_weight=weights.get("class_weight"))
    history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=hvk.callbacks(model))
    return model, history.history


def main(out: str, wanted: list[str]) -> None:
    keras.config.set_floatx("float64")
    start: Callable[[], Any] = lambda: None  # noqa: E731
    if RANKED:
        import hvdtrain

        world = hvdtrain.init("keras", seed=5)
        start = world.barrier
    else:
        block("horovod", "hvdtrain")
        if BACKEND == "tensorflow":
            import tensorflow as tf

            tf.config.run_functions_eagerly(True)
    arrays: dict[str, np.ndarray] = {}
    facts: dict[str, Any] = {}
    for name in wanted or list(CASES):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        try:
            model, history = train(CASES[name])
        except Exception as error:
            facts[name] = {"error": f"{type(error).__name__}: {error}"}
            if not hasattr(error, "shared"):
                print(f"case {name} failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                os._exit(3)
            continue
        facts[name] = {"history": history}
        arrays.update({f"{name}/{i}": value for i, value in enumerate(weights_of(model))})
        assert all(numpy_of(v).dtype == "float64" for v in model.weights), BACKEND
    if not RANKED or world.is_main:
        np.savez(out, **arrays)
        with open(out + ".json", "w") as file:
            json.dump(facts, file, default=float)
    start()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
