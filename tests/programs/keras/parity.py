"""Every loss, optimizer and precision that the adapter supports, each trained a few steps in float64.

usage: parity.py OUT.npz [case ...]     one process: plain Keras, nothing of hvdtrain; N ranks: an N-th of each batch

OUT.npz holds the weights, OUT.npz.json what `fit` logged and more, or the error. Samples are unlike in what losses
divide by: the ranks' halves of a global batch hold different numbers of labels, steps and weight.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import keras
import numpy as np
from common import BACKEND, L, block, in_float64, numpy_of, text, tokens, weights_of
from common import loss as crossentropy
from keras import ops

RANKED = int(os.environ.get("HOROVOD_SIZE", "1")) > 1
if RANKED:
    import hvdtrain

    world = hvdtrain.init("keras", seed=5)
    import hvdtrain.keras as hvk
else:
    block("horovod", "hvdtrain")

RANKS = 2
BATCH, EPOCHS = 12, 2
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
    return keras.Sequential([L.Input((5,)), L.Dense(4, activation="tanh"), L.Dense(3)])


def tagger(masked: bool = False) -> keras.Model:
    return keras.Sequential([L.Input((STEPS,), dtype="int32"), L.Embedding(9, 4, mask_zero=masked), L.Dense(3)])


def recurrent() -> keras.Model:
    return keras.Sequential([L.Input((STEPS, 1)), L.Masking(0.0), L.LSTM(3, return_sequences=True), L.Dense(3)])


def segmenter() -> keras.Model:
    return keras.Sequential([L.Input((4, 4, 1)), L.Conv2D(2, 3, padding="same"), L.Conv2D(1, 1, activation="sigmoid")])


def two_outputs() -> keras.Model:
    tokens = L.Input((STEPS,), dtype="int32")
    inner = L.Embedding(9, 4)(tokens)
    return keras.Model(tokens, {"tags": L.Dense(3)(inner), "label": L.Dense(3)(L.GlobalAveragePooling1D()(inner))})


class Balance(keras.layers.Layer):
    """Of a mixture of experts: how even the batch as a whole is spread, asked in training only."""

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.add_loss(ops.sum(ops.square(ops.mean(ops.softmax(x), axis=0))))
        return x


class OwnBatchNorm(keras.layers.Layer):
    def call(self, x: Any, training: bool = False) -> Any:
        return x - ops.mean(x, axis=0) if training else x


def with_layer(layer: keras.layers.Layer) -> keras.Model:
    return keras.Sequential([L.Input((5,)), L.Dense(4), layer, L.Dense(3)])


def contrast(y: Any, p: Any) -> Any:
    """Each sample against all others of the batch."""
    return ops.logsumexp(ops.matmul(p, ops.transpose(p)), axis=1)


def ce(**arguments: Any) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


def by_what_counts(y: Any, p: Any) -> Any:
    """One value a sample, which all divide by what counts in the batch: everything, in the first one."""
    counts = y[:, 3]
    return ops.mean(ops.square(y[:, :3] - p), -1) * counts / ops.mean(counts)


class Rmse(keras.metrics.RootMeanSquaredError):
    """No mean of batches: averaging results over ranks gets it wrong, summing states does not."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        chosen = ops.cast(ops.argmax(y_pred, axis=-1), self.dtype)
        return super().update_state(ops.cast(y_true, self.dtype), chosen, sample_weight)


def deferred() -> keras.Model:
    return keras.Sequential([L.Dense(4, activation="tanh"), L.Dense(3)])


def several() -> Any:
    return O.MultiOptimizer(O.OptimizerMap(O.SGD(0.05), {".*kernel": O.Adam(1e-2)}))


# -------------------------------------------------------------------- losses in which samples meet
def views() -> keras.Model:
    """Its 11 outputs: two views of 4, 3 logits."""
    hidden = L.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2(0.01))
    return keras.Sequential([L.Input((5,)), hidden, L.Dense(11)])


def kinds(y: Any) -> Any:
    return ops.cast(ops.equal(y[:, None], ops.cast(ops.arange(3), y.dtype)), "float64")


def log_softmax(values: Any) -> Any:
    return values - ops.logsumexp(values, axis=-1, keepdims=True)


def info_nce(y: Any, out: Any) -> Any:
    a, b = (v / ops.sqrt(ops.sum(v * v, -1, keepdims=True) + 1e-9) for v in (out[:, :4], out[:, 4:8]))
    logits = ops.matmul(a, ops.transpose(b)) / 0.2
    return -ops.mean(ops.sum(log_softmax(logits) * ops.eye(ops.shape(out)[0], dtype=out.dtype), 1))


def hardest_quarter(y: Any, out: Any) -> Any:
    each = ops.sort(-ops.sum(kinds(y) * log_softmax(out[:, 8:]), 1))
    place = ops.arange(ops.shape(each)[0])
    hard = ops.cast(place * 4 >= 3 * (ops.shape(each)[0] - 1), each.dtype)
    return ops.sum(each * hard) / ops.sum(hard)


def soft_f1_by_class(y: Any, out: Any) -> Any:
    p, k = ops.softmax(out[:, 8:]), kinds(y)
    return ops.mean(1 - 2 * ops.sum(p * k, 0) / (ops.sum(p, 0) + ops.sum(k, 0) + 1e-8))


# model, loss, optimizer, x, y; arguments of compile, prepare and fit; on TensorFlow tracing takes longer than the
# steps: few cases need it
PASSES: dict[str, Any] = {"opt": lambda: O.SGD(0.5, gradient_accumulation_steps=3)}
OF_ALL: dict[str, Any] = {"model": views, "opt": lambda: O.SGD(0.05, momentum=0.9), "prepare": {"whole": True}}
WORDS, KIND = tokens(SAMPLES)
PLAIN: dict[str, Any] = {"model": net, "loss": crossentropy}
EMBEDDED: dict[str, Any] = {"model": text, "loss": crossentropy, "x": WORDS, "y": KIND}
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
        "loss_weights": {"tags": 0.7, "label": 2.0},
    },
    "info_nce": {**OF_ALL, "loss": lambda: info_nce, "traced": True},
    "hardest_quarter": {**OF_ALL, "loss": lambda: hardest_quarter},
    "soft_f1_by_class": {**OF_ALL, "loss": lambda: soft_f1_by_class},
    # optimizers and precisions
    "sgd": {**PLAIN, "opt": lambda: O.SGD(0.1), "traced": True},
    "stock": {**PLAIN, "opt": lambda: O.SGD(0.1), "stock": True},
    "accumulate_clip": {
        **PLAIN, "opt": lambda: O.SGD(0.5, clipnorm=0.05, gradient_accumulation_steps=4), "traced": True,
    },
    "deferred_tail": {**PLAIN, "model": deferred, "opt": lambda: O.Adam(1e-2), "rmse": True, "traced": True},
    "loss_scale": {**PLAIN, "opt": lambda: O.LossScaleOptimizer(O.Adam(1e-2)), "traced": True},
    "embedding_adam": {**EMBEDDED, "opt": lambda: O.Adam(1e-2), "traced": True},
    "jit_compile": {**PLAIN, "opt": lambda: O.Adam(1e-2), "jit_compile": True, "traced": True},
    "fp16": {**PLAIN, "opt": lambda: O.SGD(0.1), "prepare": {"compression": "fp16"}},
    "global_clipnorm": {**PLAIN, "opt": lambda: O.AdamW(1e-2, weight_decay=0.1, global_clipnorm=0.05)},
    "muon": {**PLAIN, "opt": lambda: O.Muon(1e-2)},
    "multi": {**PLAIN, "opt": several},
    "embedding_clip": {**EMBEDDED, "opt": lambda: O.SGD(0.5, global_clipnorm=0.05)},
    "embedding_accumulate": {**EMBEDDED, "opt": lambda: O.SGD(0.5, gradient_accumulation_steps=2)},
    "embedding_dense": {**EMBEDDED, "opt": lambda: O.SGD(0.5), "prepare": {"sparse_as_dense": True}},
    # low precision rounds with the batch size: the twin of N ranks accumulates their batches one by one
    "mixed_float16": {**PLAIN, "opt": lambda **passes: O.SGD(1e-2, **passes), "micro": True, "traced": True},
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


def train(case: dict[str, Any]) -> tuple[keras.Model, Any]:
    in_float64(stock=case.get("stock", False))
    keras.config.set_dtype_policy("mixed_float16" if case.get("micro") else "float64")
    keras.config.set_floatx("float32" if case.get("micro") else "float64")
    # replicas start apart: only the broadcast makes them equal
    keras.utils.set_random_seed(3 + (world.rank if RANKED else 0))
    model, metrics = case["model"](), ["accuracy"] if case.get("weighted") else None
    accumulating = {"gradient_accumulation_steps": RANKS} if case.get("micro") and not RANKED else {}
    model.compile(
        case.get("opt", PASSES["opt"])(**accumulating), case["loss"](), weighted_metrics=metrics,
        metrics=["accuracy", Rmse(name="rmse")] if case.get("rmse") else None, run_eagerly=not case.get("traced"),
        jit_compile=RANKED and case.get("jit_compile", False), loss_weights=case.get("loss_weights"),
    )  # fmt: skip
    if case.get("micro"):
        return model, fit_micro_batches(model, case)
    x, y = case.get("x", X), case.get("y", LABEL)
    weights = {key: case[key] for key in ("sample_weight", "class_weight") if key in case}
    if not RANKED:
        return model, model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, **weights)
    dealt = (x, y, weights["sample_weight"]) if "sample_weight" in weights else (x, y)
    each, classes = case.get("each", BATCH // RANKS), weights.get("class_weight")
    data = hvk.loader(dealt, each, shuffle=False, class_weight=classes)
    hvk.prepare(model, data, **case.get("prepare", {}))
    return model, model.fit(data, epochs=EPOCHS, verbose=0, callbacks=hvk.callbacks(model))


def fit_micro_batches(model: keras.Model, case: dict[str, Any]) -> Any:
    """One process passes over all ranks' batches in turn; a rank has its own."""
    x, y, each = X[: 2 * BATCH].astype("float32"), LABEL[: 2 * BATCH], BATCH // RANKS
    options: dict[str, Any] = {"batch_size": each, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    if RANKED:
        mine = np.arange(len(x)).reshape(-1, RANKS, each)[:, world.rank].reshape(-1)
        x, y = x[mine], y[mine]
        options["callbacks"] = hvk.callbacks(hvk.prepare(model))
    return model.fit(x, y, **options)


def facts_of(model: keras.Model, history: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"history": history.history, "iterations": int(numpy_of(model.optimizer.iterations))}
    if RANKED:
        found["equal"] = len(set(world.gather(hvk.fingerprint(model)))) == 1
        found["proof"] = str(vars(model)["_hvdtrain"].proofs.proof)
        found["jit"] = bool(model.jit_compile)
    return found


def main(out: str, wanted: list[str]) -> None:
    arrays: dict[str, np.ndarray] = {}
    facts: dict[str, Any] = {}
    for name in wanted or list(CASES):
        case = CASES[name]
        keras.backend.clear_session()
        if BACKEND == "tensorflow" and not RANKED:
            import tensorflow as tf

            tf.config.run_functions_eagerly(not case.get("micro"))
        if name == "sgd" and RANKED and world.rank == RANKS - 1:
            net()  # a model more on one rank: names of layers and graphs differ from here on
        try:
            model, history = train(case)
        except Exception as error:
            facts[name] = {"error": f"{type(error).__name__}: {error}"}
            if not hasattr(error, "shared"):
                print(f"case {name} failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                os._exit(3)
            continue
        facts[name] = facts_of(model, history)
        arrays.update({f"{name}/{i}": value.astype("float64") for i, value in enumerate(weights_of(model))})
    if not RANKED or world.is_main:
        np.savez(out, **arrays)
        with open(out + ".json", "w") as file:
            json.dump(facts, file, default=float)
    if RANKED:
        world.barrier()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
