"""Horovod's own Keras wrapper, as the recipe's wheel has it, on Keras 3's TensorFlow backend against plain Keras of one
process, in float64.

usage: horovods_tensorflow.py FOLDER, or xla: that step alone
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd_tf
import horovod.tensorflow.keras as hvd_keras
import horovods as both
import keras
import numpy as np
import tensorflow as tf
from horovods import (
    RNG,
    SAMPLES,
    WORDS,
    L,
    Mse,
    O,
    X,
    Y,
    apart,
    compiled,
    dense,
    gap,
    hvd,
    mine,
    refused,
    tensor,
    variables,
)


def groups(model: Any) -> Any:
    return hvd_keras.DistributedOptimizer(O.SGD(0.1), groups=[layer.trainable_weights for layer in model.layers])


def optimizers() -> dict[str, float]:
    ours, tf_ours = hvd.DistributedOptimizer, hvd_keras.DistributedOptimizer
    momentum, two, twice = {"momentum": 0.9}, {"backward_passes_per_step": 2}, {"gradient_accumulation_steps": 2}
    return {
        "SGD with momentum": gap(ours(O.SGD(0.1, **momentum)), O.SGD(0.1, **momentum), traced=True),
        "sum": gap(ours(O.SGD(0.1), op=hvd.Sum), O.SGD(0.1 * hvd.size())),
        "predivided": gap(ours(O.SGD(0.1), gradient_predivide_factor=2.0), O.SGD(0.1)),
        "groups of variables": gap(groups, O.SGD(0.1), both.biased),
        "sparse": gap(ours(O.SGD(0.1)), O.SGD(0.1), both.words, WORDS, traced=True),
        "sparse as dense": gap(ours(O.SGD(0.1), sparse_as_dense=True), O.SGD(0.1), both.words, WORDS),
        "tf.keras": gap(tf_ours(O.RMSprop(0.01)), O.RMSprop(0.01)),
        "two passes": gap(tf_ours(O.SGD(0.05), **two), O.SGD(0.1, **twice), traced=True),
    }


def gradients(model: Any, x: np.ndarray, y: np.ndarray, wrap: Any = None) -> list[np.ndarray]:
    with tf.GradientTape() as tape:
        loss = Mse()(y, model(x))
    found = (wrap(tape) if wrap else tape).gradient(loss, model.trainable_variables)
    return [gradient.numpy() for gradient in found]


def function(step: Any) -> Any:
    """Without autograph: to convert Horovod's sources takes longer than all steps. `twice` has it, as users do."""
    return tf.function(step, autograph=False)


def tape() -> float:
    model = dense()
    return apart(gradients(model, mine(X), mine(Y), hvd_tf.DistributedGradientTape), gradients(model, X, Y))


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


def compiled_by_xla() -> float:
    """Horovod's all-reduce of gradients and of a loss, in functions that XLA compiles."""
    model = dense()

    @tf.function(jit_compile=True)
    def step(x: Any, y: Any) -> Any:
        with hvd_tf.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = Mse()(y, model(x))
        for weight, gradient in zip(model.weights, tape.gradient(loss, model.trainable_variables), strict=True):
            weight.assign_sub(0.1 * gradient)
        return hvd_tf.allreduce(loss, op=hvd_tf.Average, name="loss")

    found = [step(tf.constant(mine(X)), tf.constant(mine(Y))).numpy() for _ in range(2)]
    plain = compiled(dense(), O.SGD(0.1))
    wanted = [plain.train_on_batch(X, Y) for _ in range(2)]
    return apart([*found, *model.get_weights()], [*wanted, *plain.get_weights()])


def local_layer_of_a_tape() -> dict[str, float]:
    found = {}
    for name, scaled in {"scaled": True, "not scaled": False}.items():
        model = dense()
        own, every = gradients(model, mine(X), mine(Y)), gradients(model, X, Y)

        def partial(tape: Any, local: Any = model.layers[0], scaled: bool = scaled) -> Any:
            return hvd_tf.PartialDistributedGradientTape(tape, local_layers=[local], scale_local_gradients=scaled)

        wanted = [*(gradient / (hvd.size() if scaled else 1) for gradient in own[:1]), *every[1:]]
        found[name] = apart(gradients(model, mine(X), mine(Y), partial), wanted)
    return found


TABLE_ROWS = RNG.integers(0, 6, (3, 5))  # of each rank
FIVE = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], RNG.normal(size=(6, 2))]


def head_gradients(model: Any, rank: int, step: int, tape: Any) -> Any:
    """The shared variable on all ranks, the first head on even ranks, the second one on odd ones (in the next step the
    other way round), the words on rank 0 alone, the last on none."""
    shared, first, second, _, table = (variable.value for variable in model)
    with tape:
        loss = tf.reduce_sum(shared**2) * (rank + 1)
        loss += tf.reduce_sum((first if (rank + step) % 2 == 0 else second) ** 3) * (rank + 2)
        if rank == 0:
            loss += tf.reduce_sum(tf.gather(table, TABLE_ROWS[rank]) ** 2)
    return tape.gradient(loss, [variable.value for variable in model])


def mean_of_all(model: Any, step: int, ranks: int, as_dense: bool) -> list[Any]:
    """In numpy, with zeros where a rank has no gradient, None where all have none. The words are rank 0's."""
    each = [head_gradients(model, rank, step, tf.GradientTape()) for rank in range(ranks)]
    words = tf.IndexedSlices(each[0][-1].values / ranks, each[0][-1].indices, each[0][-1].dense_shape)
    there = [[one.numpy() for one in of_one if one is not None] for of_one in list(zip(*each, strict=True))[:-1]]
    means = [tf.constant(sum(some) / ranks) if some else None for some in there]
    return [*means, tf.convert_to_tensor(words) if as_dense else words]


def none_on_some(traced: bool, by_tape: bool, sparse_as_dense: bool = False, **settings: Any) -> float:
    def plain() -> Any:
        return O.SGD(0.1, momentum=0.5, weight_decay=0.3)

    ours, wanted, reference = variables(*FIVE), variables(*FIVE), plain()
    settings["sparse_as_dense"] = sparse_as_dense
    optimizer = plain() if by_tape else hvd_keras.DistributedOptimizer(plain(), **settings)

    def one(step: int) -> None:
        tape = tf.GradientTape()
        if by_tape:
            tape = hvd_tf.DistributedGradientTape(tape, **settings)
        optimizer.apply(head_gradients(ours, hvd_keras.rank(), step, tape), ours)

    optimizer.build(ours)
    call = function(one) if traced else one
    for step in (0, 1, 0, 1):
        reference.apply(mean_of_all(wanted, step, hvd_keras.size(), sparse_as_dense), wanted)
        call(step)  # a function is traced anew for another step, on all ranks
    assert np.array_equal(ours[3].numpy(), FIVE[3])
    return apart(ours, wanted)


def kept() -> dict[str, float]:
    """What an optimizer knows beside its configuration: exclusions as well."""

    def excluding() -> Any:
        optimizer = O.AdamW(0.1, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer

    one, gradient = tensor(1.0), tensor(hvd_keras.rank() * 2.0 / (hvd_keras.size() - 1))
    ours, plain = (keras.Variable([10.0], name="bias", dtype="float64") for _ in range(2))
    hvd_keras.DistributedOptimizer(excluding()).apply([gradient], [ours])
    excluding().apply([one], [plain])
    return both.kept() | {"excluded": apart([ours], [plain])}


def passes(traced: bool) -> float:
    """A gradient that is None in the last pass, or in the first."""
    ours, optimizer = (
        variables([0.0], [0.0], [3.0]),
        hvd_keras.DistributedOptimizer(O.SGD(1.0), backward_passes_per_step=2),
    )
    optimizer.build(ours)

    def one(which: int) -> None:
        gradient = tf.constant([1.0 + hvd_keras.rank()], tf.float64)
        optimizer.apply([gradient if n == which else None for n in range(3)], ours)

    call = function(one) if traced else one
    for which in (0, 1, 0, 1):
        call(which)
    total = -2 * sum(range(1, hvd_keras.size() + 1)) / hvd_keras.size()
    if traced:  # the first pass was traced before the second, and adds up what the second one brings later
        call(0)
        call(1)
        total *= 1.5
        return apart([ours[0]], [[total]]) + apart([ours[2]], [[3.0]])
    return apart(ours, [[total], [total], [3.0]])


def clipped(op: Any, traced: bool) -> float:
    (ours,), optimizer = variables([0.0]), hvd_keras.DistributedOptimizer(O.SGD(1.0), op=op)
    optimizer.build([ours])

    def one() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(ours.value) * (hvd_keras.rank() + 1)
        pairs = optimizer.compute_gradients(loss, [ours], tape=tape)
        optimizer.apply_gradients([(tf.clip_by_value(gradient, -100, 100), variable) for gradient, variable in pairs])

    call = function(one) if traced else one
    for _ in range(2):
        call()
    total = sum(range(1, hvd_keras.size() + 1))
    return apart([ours], [[-2 * total / (hvd_keras.size() if op == hvd_tf.Average else 1)]])


def twice() -> float:
    """Two updates of one optimizer, and two tapes, in a function; what is applied twice as well."""
    first, second = variables([0.0], [0.0])
    optimizer = hvd_keras.DistributedOptimizer(O.SGD(1.0))
    optimizer.build([first, second])

    @tf.function
    def step(scale: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            one, other = tf.reduce_sum(first.value) * scale, tf.reduce_sum(second.value) * 100 * scale
        for variable, factor in ((first, 1), (second, 100), (second, 1000)):
            optimizer.apply([tf.ones([1], tf.float64) * factor * scale], [variable])
        wrapped = hvd_tf.DistributedGradientTape(tape)
        return wrapped.gradient(one, first), wrapped.gradient(other, {"second": second})["second"]

    mean = (hvd_keras.size() + 1) / 2
    for _ in range(3):
        found = step(tf.constant(hvd_keras.rank() + 1.0, tf.float64))
    return apart([first, second, *found], [[-3 * mean], [-3300 * mean], [mean], [100 * mean]])


def in_16_bits() -> float:
    mean = np.arange(4.0) + (hvd_keras.size() - 1) / 2
    values = [np.arange(4.0) + hvd_keras.rank(), *variables(np.arange(4.0) + hvd_keras.rank())]
    kind = {"compression": hvd_tf.Compression.fp16}
    found = [hvd_tf.allreduce(value, **kind) for value in values] + hvd_tf.grouped_allreduce(values, **kind)
    return apart(found, [mean] * 4)


def refusals() -> dict[str, str]:
    ours, scaled = hvd_keras.DistributedOptimizer, O.LossScaleOptimizer
    gathering = O.SGD(1.0, gradient_accumulation_steps=2)
    return {
        "a scale around it": refused(lambda: scaled(ours(O.SGD(1.0)))),
        "passes twice": refused(lambda: ours(gathering, backward_passes_per_step=2)),
        "passes twice, scaled": refused(lambda: ours(scaled(gathering), backward_passes_per_step=2)),
        "a name": refused(lambda: ours("sgd")),
        "other gradients": refused(other_gradients_on_one_rank),
    }


def other_gradients_on_one_rank() -> None:
    """A function that one rank alone traces anew, with a gradient more: it cannot be that the ranks wait."""
    hvd_tf.which_gradients.PATIENCE_S = 2
    ours, optimizer = variables([0.0], [0.0]), hvd_keras.DistributedOptimizer(O.SGD(1.0))
    optimizer.build(ours)

    @tf.function
    def step(both: bool) -> None:
        one = tf.constant([1.0], tf.float64)
        optimizer.apply([one, one if both else None], ours)

    step(False)
    if hvd_keras.rank() == hvd_keras.size() - 1:
        step(True)
    else:
        raise ValueError("this rank traces nothing anew")


def in_a_set() -> float:
    some = hvd_tf.add_process_set([0, 1]) if hvd_keras.size() > 2 else hvd_tf.global_process_set
    ours, optimizer = variables([0.0], [0.0]), hvd_keras.DistributedOptimizer(O.SGD(1.0), process_set=some)
    gradient = tf.constant([1.0 + hvd_keras.rank()], tf.float64)
    if hvd_keras.rank() > 1:
        return 0.0
    optimizer.apply([gradient, gradient if hvd_keras.rank() else None], ours)
    return apart(ours, [[-1.5], [-1.0]])


def main(folder: str) -> None:
    both.common.in_float64()
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    hvd.init()
    if folder == "xla":
        compiled_by_xla()
        return
    batch_norm = sync_batch_norm()
    differs = {"batch norm": batch_norm.pop("alone")}
    nones = {
        "eager": none_on_some(False, False), "function": none_on_some(True, False),
        "tape in a function": none_on_some(True, True), "as dense": none_on_some(True, False, sparse_as_dense=True),
        "tape, groups": none_on_some(True, True, groups=2), "in a set": in_a_set(),
    }  # fmt: skip
    exact = {
        "fits": optimizers(), "None": nones, "tape": tape(), "local, by a tape": local_layer_of_a_tape(),
        "batch norm": batch_norm, "kept": kept(), "in functions": twice(), "XLA": compiled_by_xla(),
        "clipped": {"sum": clipped(hvd_tf.Sum, True), "average": clipped(hvd_tf.Average, False)},
        "passes": {"eager": passes(False), "function": passes(True)}, "16 bits": in_16_bits(),
    }  # fmt: skip
    both.report(Path(folder), exact, gradients, differs=differs, refused=refusals)
    hvd_tf.allreduce(tf.constant(0.0), name="all were told")  # who leaves ends the others' waiting


if __name__ == "__main__":
    main(sys.argv[1])
