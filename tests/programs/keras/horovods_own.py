"""Horovod's own Keras wrapper, as the recipe's wheel has it, on Keras 3's TensorFlow backend against plain Keras of one
process, in float64.

usage: horovods_own.py FOLDER [adasum]

With `adasum`, that alone, which needs MPI.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
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
        "two groups, by their old name": gap(ours(O.SGD(0.1), num_groups=2), O.SGD(0.1)),
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


def gradients(model: Any, x: np.ndarray, y: np.ndarray, wrap: Any = None) -> list[np.ndarray]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    found = (wrap(tape) if wrap else tape).gradient(loss, model.trainable_variables)
    return [gradient.numpy() for gradient in found]


def tape() -> float:
    model = dense()
    return apart(gradients(model, mine(X), mine(Y), hvd_tf.DistributedGradientTape), gradients(model, X, Y))


def fp16() -> float:
    """Gradients that travel in 16 bits: near those of one process, and not the same."""
    return gap(hvd.DistributedOptimizer(O.SGD(0.1), compression=hvd.Compression.fp16), O.SGD(0.1))


def adasum() -> dict[str, float]:
    """Of two ranks' gradients, variable by variable: equation 3 of Maleki et al., "Scaling Distributed Training with
    Adaptive Summation" (2021). Horovod's DistributedOptimizer for Keras takes no such operation."""
    model, x, y = dense(), X.reshape(2, -1, 5), Y.reshape(2, -1, 2)
    one, other = (gradients(model, x[rank], y[rank]) for rank in (0, 1))
    with tf.GradientTape() as inner:
        loss = tf.reduce_mean((model(x[hvd.rank()]) - y[hvd.rank()]) ** 2)
    wrapped = hvd_tf.DistributedGradientTape(inner, op=hvd_tf.Adasum)
    found = wrapped.gradient(loss, model.trainable_variables)
    pairs = [(a, b, float((a * b).sum())) for a, b in zip(one, other, strict=True)]
    wanted = [(1 - ab / (2 * (a * a).sum())) * a + (1 - ab / (2 * (b * b).sum())) * b for a, b, ab in pairs]
    return {"gap": apart(found, wanted), "mean": apart(found, [(a + b) / 2 for a, b, _ in pairs])}


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


def callbacks() -> dict[str, Any]:
    """Different weights, broadcast; rates that warm up and fall; no correction of momentum, which is said."""
    rates, model = common.Rates(), dense()
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


def local_layer() -> dict[str, float]:
    """One step with a layer of each rank's own, whose gradients are divided by the number of ranks, or not."""
    found, rate = {}, 0.1
    for name, scaled in {"scaled": True, "not scaled": False}.items():
        model = dense()
        start, own, every = model.get_weights(), gradients(model, mine(X), mine(Y)), gradients(model, X, Y)
        own = [gradient / (hvd.size() if scaled else 1) for gradient in own]
        wanted = [w - rate * g for w, g in zip(start, [*own[:2], *every[2:]], strict=True)]

        def partial(tape: Any, local: Any = model.layers[0], scaled: bool = scaled) -> Any:
            return hvd_tf.PartialDistributedGradientTape(tape, local_layers=local, scale_local_gradients=scaled)

        by_tape = gradients(model, mine(X), mine(Y), partial)
        found[f"tape, {name}"] = apart(by_tape, [*own[:2], *every[2:]])
        optimizer = hvd.PartialDistributedOptimizer(
            O.SGD(rate), local_layers=[model.layers[0]], scale_local_gradients=scaled
        )
        model.compile(optimizer, "mse", jit_compile=False)
        model.train_on_batch(mine(X), mine(Y))
        found[name] = apart(model.get_weights(), wanted)
        all_averaged = [w - rate * g for w, g in zip(start, every, strict=True)]
        found["all averaged"] = apart(model.get_weights(), all_averaged)
    return found


def best_checkpoint(folder: Path) -> list[float]:
    """What rank 0 kept: the weights of the best epoch, which is not the last."""
    model, best = dense(), hvd.callbacks.BestModelCheckpoint(monitor="loss")
    best.filepath = str(folder / "best.keras")
    worse = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 if epoch < 2 else 1e3)
    model.compile(O.SGD(0.1), "mse", jit_compile=False)
    kept: list[Any] = []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: kept.append(model.get_weights()))
    callbacks = [worse, keep, *([best] if hvd.rank() == 0 else [])]
    model.fit(X, Y, batch_size=BATCH, shuffle=False, epochs=3, verbose=0, callbacks=callbacks)
    hvd.allreduce(np.zeros(1), name="kept")
    weights = keras.models.load_model(best.filepath).get_weights()
    return [apart(weights, one) for one in kept[1:]]


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


def main(folder: Path, *only: str) -> None:
    keras.config.set_floatx("float64")
    hvd.init()
    if only:
        found: dict[str, Any] = {"adasum": adasum()}
    else:
        found = {"optimizers": optimizers(), "loaded": loaded(folder), "tape": tape(), "callbacks": callbacks()}
        found |= {"local": local_layer(), "elastic": elastic(), "alone": alone(), "batch norm": sync_batch_norm()}
        found |= {"fp16": fp16(), "best": best_checkpoint(folder), "overflow": overflow_on_one_rank()}
    (folder / f"{hvd.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
