"""Horovod's own Keras wrapper, as the recipe's wheel has it, on Keras 3's TensorFlow backend against plain Keras of one
process, in float64.

usage: horovods_own.py FOLDER [adasum]

With `adasum`, that alone, which needs MPI.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd_tf
import horovod.tensorflow.keras as hvd_tf_keras
import horovods as both
import keras
import numpy as np
import tensorflow as tf
from horovods import RNG, SAMPLES, WORDS, L, Mse, O, X, Y, apart, dense, gap, hvd, mine, words


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


def gradients(model: Any, x: np.ndarray, y: np.ndarray, wrap: Any = None) -> list[np.ndarray]:
    with tf.GradientTape() as tape:
        loss = Mse()(y, model(x))
    found = (wrap(tape) if wrap else tape).gradient(loss, model.trainable_variables)
    return [gradient.numpy() for gradient in found]


def tape() -> float:
    model = dense()
    return apart(gradients(model, mine(X), mine(Y), hvd_tf.DistributedGradientTape), gradients(model, X, Y))


def adasum() -> dict[str, float]:
    """Of two ranks' gradients, variable by variable: equation 3 of Maleki et al., "Scaling Distributed Training with
    Adaptive Summation" (2021). Horovod's DistributedOptimizer for Keras takes no such operation."""
    model, x, y = dense(), X.reshape(2, -1, 5), Y.reshape(2, -1, 2)
    one, other = (gradients(model, x[rank], y[rank]) for rank in (0, 1))
    with tf.GradientTape() as inner:
        loss = Mse()(y[hvd.rank()], model(x[hvd.rank()]))
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


def local_layer() -> dict[str, float]:
    found = both.local_layer(gradients)
    for name, scaled in {"scaled": True, "not scaled": False}.items():
        model = dense()
        own, every = gradients(model, mine(X), mine(Y)), gradients(model, X, Y)

        def partial(tape: Any, local: Any = model.layers[0], scaled: bool = scaled) -> Any:
            return hvd_tf.PartialDistributedGradientTape(tape, local_layers=[local], scale_local_gradients=scaled)

        wanted = [*(gradient / (hvd.size() if scaled else 1) for gradient in own[:2]), *every[2:]]
        found[f"tape, {name}"] = apart(gradients(model, mine(X), mine(Y), partial), wanted)
    return found


def main(folder: Path, *only: str) -> None:
    keras.config.set_floatx("float64")
    hvd.init()
    if only:
        found: dict[str, Any] = {"adasum": adasum()}
    else:
        found = {"optimizers": optimizers(), "loaded": both.loaded(folder), "tape": tape()}
        found |= {"callbacks": both.callbacks(), "local": local_layer(), "elastic": both.elastic()[0]}
        found |= {"alone": gap(O.SGD(0.1, momentum=0.9), O.SGD(0.1, momentum=0.9)), "batch norm": sync_batch_norm()}
        found |= {"fp16": gap(hvd.DistributedOptimizer(O.SGD(0.1), compression=hvd.Compression.fp16), O.SGD(0.1))}
        found |= {"best": both.best_checkpoint(folder), "overflow": both.overflow_on_one_rank()}
    (folder / f"{hvd.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
