"""Horovod's own Keras wrapper, as the recipe's wheel has it, on Keras 3's TensorFlow backend against plain Keras of one
process, in float64.

usage: horovods_own.py FOLDER
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.keras as hvd
import horovod.tensorflow as hvd_tf
import horovod.tensorflow.keras as hvd_tf_keras
import keras
import numpy as np
import tensorflow as tf

O = keras.optimizers  # noqa: E741
L = keras.layers
SAMPLES, BATCH, EPOCHS = 48, 12, 2
RNG = np.random.default_rng(0)
X, WORDS, Y = RNG.normal(size=(SAMPLES, 5)), RNG.integers(0, 50, (SAMPLES, 4)), RNG.normal(size=(SAMPLES, 2))


def dense() -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((5,)), L.Dense(8, activation="tanh"), L.Dense(2)])


def words() -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4,)), L.Embedding(50, 3), L.Flatten(), L.Dense(2)])


def mine(data: np.ndarray) -> np.ndarray:
    """This rank's samples, so that the ranks' batches make up those of one process."""
    each = BATCH // hvd.size()
    return data.reshape(-1, hvd.size(), each, *data.shape[1:])[:, hvd.rank()].reshape(-1, *data.shape[1:])


def apart(a: Any, b: Any) -> float:
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in zip(a, b, strict=True))


def fitted(make: Callable[[], Any], x: np.ndarray, optimizer: Any, callbacks: Any = (), whole: bool = False) -> Any:
    model = make()
    model.compile(optimizer=optimizer(model) if callable(optimizer) else optimizer, loss="mse", jit_compile=False)
    data = (x, Y) if whole else (mine(x), mine(Y))
    each = BATCH if whole else BATCH // hvd.size()
    fit = model.fit(*data, batch_size=each, shuffle=False, epochs=EPOCHS, verbose=0, callbacks=list(callbacks))
    return model, fit.history["loss"]


def gap(ours: Any, plain: Any, make: Any = dense, x: np.ndarray = X) -> float:
    metrics = [hvd.callbacks.MetricAverageCallback()]
    (model, losses), (other, wanted) = fitted(make, x, ours, metrics), fitted(make, x, plain, whole=True)
    return apart([*model.get_weights(), losses], [*other.get_weights(), wanted])


def groups(model: Any) -> Any:
    return hvd_tf_keras.DistributedOptimizer(O.SGD(0.1), groups=[layer.trainable_weights for layer in model.layers])


def optimizers() -> dict[str, float]:
    ours, tf_ours = hvd.DistributedOptimizer, hvd_tf_keras.DistributedOptimizer
    momentum, clipped = {"momentum": 0.9}, {"global_clipnorm": 0.5}
    two, twice = {"backward_passes_per_step": 2}, {"gradient_accumulation_steps": 2}
    average = {"average_aggregated_gradients": True}
    return {
        "SGD with momentum": gap(ours(O.SGD(0.1, **momentum)), O.SGD(0.1, **momentum)),
        "Adam, clipped": gap(ours(O.Adam(0.01, **clipped)), O.Adam(0.01, **clipped)),
        "sum": gap(ours(O.SGD(0.1), op=hvd.Sum), O.SGD(0.1 * hvd.size())),
        "predivided": gap(ours(O.SGD(0.1), gradient_predivide_factor=2.0), O.SGD(0.1)),
        "two groups": gap(ours(O.SGD(0.1), groups=2), O.SGD(0.1)),
        "groups of variables": gap(groups, O.SGD(0.1)),
        "sparse": gap(ours(O.SGD(0.1)), O.SGD(0.1), words, WORDS),
        "sparse, in a group": gap(ours(O.SGD(0.1), groups=1), O.SGD(0.1), words, WORDS),
        "sparse as dense": gap(ours(O.SGD(0.1), sparse_as_dense=True), O.SGD(0.1), words, WORDS),
        "tf.keras": gap(tf_ours(O.RMSprop(0.01)), O.RMSprop(0.01)),
        "two passes, averaged": gap(tf_ours(O.SGD(0.1), **average, **two), O.SGD(0.1, **twice)),
        "two passes": gap(tf_ours(O.SGD(0.05), **two), O.SGD(0.1, **twice)),
    }


def loaded(folder: Path) -> dict[str, Any]:
    """A saved model is one of plain Keras; loaded by Horovod it goes on as one process."""
    model, _ = fitted(dense, X, hvd.DistributedOptimizer(O.Adam(0.01)))
    file = folder / "model.keras"
    if hvd.rank() == 0:
        model.save(file)
    hvd.allreduce(np.zeros(1), name="saved")
    plain, ours = keras.models.load_model(file), hvd.load_model(str(file))
    plain.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    ours.fit(mine(X), mine(Y), batch_size=BATCH // hvd.size(), shuffle=False, verbose=0)
    kept = type(plain.optimizer) is O.Adam and json.dumps(model.optimizer.get_config()) == json.dumps(
        plain.optimizer.get_config()
    )
    return {"gap": apart(ours.get_weights(), plain.get_weights()), "plain": kept}


def tape() -> float:
    model = dense()
    with tf.GradientTape() as inner:
        loss = tf.reduce_mean((model(mine(X)) - mine(Y)) ** 2)
    found = hvd_tf.DistributedGradientTape(inner).gradient(loss, model.trainable_variables)
    with tf.GradientTape() as whole:
        loss = tf.reduce_mean((model(X) - Y) ** 2)
    return apart(found, whole.gradient(loss, model.trainable_variables))


def sync_batch_norm() -> dict[str, float]:
    """Ranks with more and fewer samples, masked and not: statistics and gradients of one process with all of them."""
    rows, steps = np.arange(SAMPLES), RNG.normal(size=(SAMPLES, 3, 5))
    masked = {"mask": rows[:, None] % 4 > np.arange(3)}
    own = rows % (hvd.size() + 1) == hvd.rank()
    if hvd.rank() == 0:
        own |= rows % (hvd.size() + 1) == hvd.size()

    def found(layer: Any, x: np.ndarray, some: np.ndarray, mask: dict[str, np.ndarray]) -> tuple[Any, list[Any]]:
        layer.build((None, *x.shape[1:]))
        with tf.GradientTape() as tape:
            y = layer(x[some], training=True, **{name: value[some] for name, value in mask.items()})
            loss = tf.reduce_sum(y**3 * x[some])
        return tape.gradient(loss, [v.value for v in layer.trainable_variables]), layer.get_weights()

    gaps = {}
    for name, x, mask in [("rows", X, {}), ("steps", steps, {}), ("masked", steps, masked)]:
        ours, all_of_them = hvd_tf.SyncBatchNormalization(), rows >= 0
        gradients, weights = found(ours, x, own, mask)
        total = [hvd_tf.allreduce(one, op=hvd_tf.Sum) for one in gradients]
        wanted, plain_weights = found(L.BatchNormalization(), x, all_of_them, mask)
        gaps[name] = apart([*total, *weights], [*wanted, *plain_weights])
    _, alone = found(L.BatchNormalization(), X, own, {})
    return gaps | {"alone": apart(alone[2:], found(L.BatchNormalization(), X, rows >= 0, {})[1][2:])}


class Rates(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(round(float(self.model.optimizer.learning_rate.numpy()), 6))


def callbacks() -> dict[str, Any]:
    """Different weights, broadcast; rates that warm up and fall; no correction of momentum, which is said."""
    rates, model = Rates(), dense()
    model.set_weights([w + hvd.rank() for w in model.get_weights()])
    model.compile(hvd.DistributedOptimizer(O.SGD(0.2, momentum=0.9)), "mse", jit_compile=False)
    schedule = hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.2, multiplier=0.1, start_epoch=3)
    warm = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.2, warmup_epochs=3, steps_per_epoch=4)
    ours = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), warm, schedule, rates]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.fit(mine(X), mine(Y), batch_size=BATCH // hvd.size(), epochs=6, verbose=0, callbacks=ours)
    every = hvd_tf.allgather(tf.constant(model.get_weights()[0][None])).numpy()
    told = sum("momentum_correction" in str(one.message) for one in said)
    return {"rates": rates.seen, "apart": apart([every[0]], [every[-1]]), "told": told}


def local_layer() -> list[float]:
    model = dense()
    optimizer = hvd.PartialDistributedOptimizer(O.SGD(0.1), local_layers=[model.layers[0]])
    model.compile(optimizer, "mse", jit_compile=False)
    model.train_on_batch(mine(X), mine(Y))
    return [float(np.ptp(hvd_tf.allgather(tf.constant(w[None])).numpy(), 0).max()) for w in model.get_weights()]


def elastic() -> dict[str, Any]:
    model = dense()
    model.compile(O.Adam(0.01), "mse")
    model.optimizer.build(model.trainable_variables)
    model.set_weights([w * 0 + 1 + hvd.rank() for w in model.get_weights()])
    state = hvd.elastic.KerasState(model, batch=20 + hvd.rank())
    state.sync()
    synced = float(model.get_weights()[0].max())
    model.set_weights([w * 0 + 7 for w in model.get_weights()])
    state.restore()
    return {"synced": synced, "restored": float(model.get_weights()[0].max()), "batch": state.batch}


def overflow_on_one_rank() -> dict[str, Any]:
    """A float16 policy: all ranks skip the step, and have one scale."""
    keras.config.set_dtype_policy("mixed_float16")
    targets = mine(Y).astype("float32")
    if hvd.rank() == 1:
        targets[3] = 1e30
    model = dense()
    model.compile(hvd.DistributedOptimizer(O.Adam(0.01)), "mse", jit_compile=False)
    model.fit(mine(X), targets, batch_size=BATCH // hvd.size(), shuffle=False, verbose=0)
    found = [model.get_weights()[0], np.float32(model.optimizer.dynamic_scale.numpy())]
    every = [hvd_tf.allgather(tf.constant(one[None])).numpy() for one in map(np.asarray, found)]
    return {"apart": apart([one[0] for one in every], [one[-1] for one in every]), "scale": float(found[1])}


def alone() -> float:
    """The negative twin: without the wrapper."""
    return gap(O.SGD(0.1, momentum=0.9), O.SGD(0.1, momentum=0.9))


def main(folder: Path) -> None:
    keras.config.set_floatx("float64")
    hvd.init()
    found = {"optimizers": optimizers(), "loaded": loaded(folder), "tape": tape(), "callbacks": callbacks()}
    found |= {"local": local_layer(), "elastic": elastic(), "alone": alone(), "batch norm": sync_batch_norm()}
    found |= {"overflow": overflow_on_one_rank()}
    (folder / f"{hvd.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
