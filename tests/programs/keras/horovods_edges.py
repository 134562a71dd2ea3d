"""Where Horovod's own Keras wrapper could go wrong unsaid, on Keras 3's TensorFlow backend, in float64: gradients that
are None on some ranks, copies of what is distributed, passes, clipping, first steps.

usage: horovods_edges.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd_tf
import horovod.tensorflow.keras as hvd
import horovods as both
import keras
import numpy as np
import tensorflow as tf
from horovods import L, O, apart, refused, tensor, variables

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 2, 4)), RNG.normal(size=(24, 2, 1)) * 5  # each sample for two tasks
WORDS = RNG.integers(0, 6, (3, 5))  # of each rank


FIVE = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], RNG.normal(size=(6, 2))]


def head_gradients(model: Any, rank: int, step: int, tape: Any) -> Any:
    """The shared variable on all ranks, the first head on even ranks, the second one on odd ones (in the next step the
    other way round), the words on rank 0 alone, the last on none."""
    shared, first, second, _, table = (variable.value for variable in model)
    with tape:
        loss = tf.reduce_sum(shared**2) * (rank + 1)
        loss += tf.reduce_sum((first if (rank + step) % 2 == 0 else second) ** 3) * (rank + 2)
        if rank == 0:
            loss += tf.reduce_sum(tf.gather(table, WORDS[rank]) ** 2)
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
        return O.AdamW(0.1, weight_decay=0.3)

    ours, wanted, reference = variables(*FIVE), variables(*FIVE), plain()
    settings["sparse_as_dense"] = sparse_as_dense
    optimizer = plain() if by_tape else hvd.DistributedOptimizer(plain(), **settings)

    def one(step: int) -> None:
        tape = tf.GradientTape()
        if by_tape:
            tape = hvd_tf.DistributedGradientTape(tape, **settings)
        optimizer.apply(head_gradients(ours, hvd.rank(), step, tape), ours)

    optimizer.build(ours)
    call = tf.function(one) if traced else one
    for step in (0, 1, 0, 1):
        reference.apply(mean_of_all(wanted, step, hvd.size(), sparse_as_dense), wanted)
        call(step)  # a function is traced anew for another step, on all ranks
    assert np.array_equal(ours[3].numpy(), FIVE[3])
    return apart(ours, wanted)


class Tasks(keras.Model):
    """Two heads of one shape: a rank has samples of one task."""

    def __init__(self, tasks: list[int]) -> None:
        super().__init__()
        keras.utils.set_random_seed(1)
        self.tasks, self.trunk, self.heads = tasks, L.Dense(3), [L.Dense(1), L.Dense(1)]
        self.trunk.build((None, 4))
        for head in self.heads:
            head.build((None, 3))
        self.built = True

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            losses = [
                tf.reduce_mean((self.heads[task](self.trunk(x[:, n])) - y[:, n]) ** 2)
                for n, task in enumerate(self.tasks)
            ]
            loss = tf.add_n(losses) / len(losses)
        grads = tape.gradient(loss, [variable.value for variable in self.trainable_variables])
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


def one_task_each() -> float:
    tasks = [rank % 2 for rank in range(hvd.size())]
    ours, plain = Tasks([tasks[hvd.rank()]]), Tasks(tasks)
    ours.compile(hvd.DistributedOptimizer(O.SGD(0.1)))
    plain.compile(O.SGD(0.1))
    mine, fits = (
        [tasks[hvd.rank()]],
        {"batch_size": 5, "shuffle": False, "verbose": 0},
    )  # a last batch of 4: traced anew
    ours.fit(X[:, mine], Y[:, mine], **fits)
    plain.fit(X[:, tasks], Y[:, tasks], **fits)
    return apart(ours.get_weights(), plain.get_weights())


def model() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((4,)), L.Dense(3, activation="tanh"), L.Dense(1)])


def mine(data: np.ndarray) -> np.ndarray:
    return data[hvd.rank() :: hvd.size(), 0]


def kept() -> dict[str, float]:
    """What an optimizer knows beside its configuration: exclusions as well."""

    def excluding() -> Any:
        optimizer = O.AdamW(0.1, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer

    one, gradient = tensor(1.0), tensor(hvd.rank() * 2.0 / (hvd.size() - 1))
    ours, plain = (keras.Variable([10.0], name="bias", dtype="float64") for _ in range(2))
    hvd.DistributedOptimizer(excluding()).apply([gradient], [ours])
    excluding().apply([one], [plain])
    return both.kept() | {"excluded": apart([ours], [plain])}


def passes(traced: bool) -> float:
    """A gradient that is None in the last pass, or in the first."""
    ours, optimizer = variables([0.0], [0.0], [3.0]), hvd.DistributedOptimizer(O.SGD(1.0), backward_passes_per_step=2)
    optimizer.build(ours)

    def one(which: int) -> None:
        gradient = tf.constant([1.0 + hvd.rank()], tf.float64)
        optimizer.apply([gradient if n == which else None for n in range(3)], ours)

    call = tf.function(one) if traced else one
    for which in (0, 1, 0, 1):
        call(which)
    total = -2 * sum(range(1, hvd.size() + 1)) / hvd.size()
    if traced:  # the first pass was traced before the second, and adds up what the second one brings later
        call(0)
        call(1)
        total *= 1.5
        return apart([ours[0]], [[total]]) + apart([ours[2]], [[3.0]])
    return apart(ours, [[total], [total], [3.0]])


def clipped(op: Any, traced: bool) -> float:
    (ours,), optimizer = variables([0.0]), hvd.DistributedOptimizer(O.SGD(1.0), op=op)
    optimizer.build([ours])

    def one() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(ours.value) * (hvd.rank() + 1)
        pairs = optimizer.compute_gradients(loss, [ours], tape=tape)
        optimizer.apply_gradients([(tf.clip_by_value(gradient, -100, 100), variable) for gradient, variable in pairs])

    call = tf.function(one) if traced else one
    for _ in range(2):
        call()
    total = sum(range(1, hvd.size() + 1))
    return apart([ours], [[-2 * total / (hvd.size() if op == hvd_tf.Average else 1)]])


def first_step() -> float:
    """Other weights on each rank before they are broadcast: the first step is rank 0's, from all samples."""
    ours, plain = model(), model()
    ours.set_weights([weight + hvd.rank() for weight in ours.get_weights()])
    ours.compile(hvd.DistributedOptimizer(O.Adam(0.1)), "mse", jit_compile=False)
    plain.compile(O.Adam(0.1), "mse", jit_compile=False)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    ours.fit(mine(X), mine(Y), batch_size=24, shuffle=False, verbose=0, callbacks=callbacks)
    plain.fit(X[:, 0], Y[:, 0], batch_size=24, shuffle=False, verbose=0)
    return apart(ours.get_weights(), plain.get_weights())


def twice() -> float:
    """Two updates of one optimizer, and two tapes, in a function; what is applied twice as well."""
    first, second = variables([0.0], [0.0])
    optimizer = hvd.DistributedOptimizer(O.SGD(1.0))
    optimizer.build([first, second])

    @tf.function
    def both(scale: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            one, other = tf.reduce_sum(first.value) * scale, tf.reduce_sum(second.value) * 100 * scale
        for variable, factor in ((first, 1), (second, 100), (second, 1000)):
            optimizer.apply([tf.ones([1], tf.float64) * factor * scale], [variable])
        wrapped = hvd_tf.DistributedGradientTape(tape)
        return wrapped.gradient(one, first), wrapped.gradient(other, {"second": second})["second"]

    mean = (hvd.size() + 1) / 2
    for _ in range(3):
        found = both(tf.constant(hvd.rank() + 1.0, tf.float64))
    return apart([first, second, *found], [[-3 * mean], [-3300 * mean], [mean], [100 * mean]])


def in_16_bits() -> float:
    mean = np.arange(4.0) + (hvd.size() - 1) / 2
    values = [np.arange(4.0) + hvd.rank(), *variables(np.arange(4.0) + hvd.rank())]
    kind = {"compression": hvd_tf.Compression.fp16}
    found = [hvd_tf.allreduce(value, **kind) for value in values] + hvd_tf.grouped_allreduce(values, **kind)
    return apart(found, [mean] * 4)


def refusals() -> dict[str, str]:
    ours, scaled = hvd.DistributedOptimizer, O.LossScaleOptimizer
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
    ours, optimizer = variables([0.0], [0.0]), hvd.DistributedOptimizer(O.SGD(1.0))
    optimizer.build(ours)

    @tf.function
    def step(both: bool) -> None:
        one = tf.constant([1.0], tf.float64)
        optimizer.apply([one, one if both else None], ours)

    step(False)
    if hvd.rank() == hvd.size() - 1:
        step(True)
    else:
        raise ValueError("this rank traces nothing anew")


def in_a_set() -> float:
    some = hvd_tf.add_process_set([0, 1]) if hvd.size() > 2 else hvd_tf.global_process_set
    ours, optimizer = variables([0.0], [0.0]), hvd.DistributedOptimizer(O.SGD(1.0), process_set=some)
    gradient = tf.constant([1.0 + hvd.rank()], tf.float64)
    if hvd.rank() > 1:
        return 0.0
    optimizer.apply([gradient, gradient if hvd.rank() else None], ours)
    return apart(ours, [[-1.5], [-1.0]])


def main(folder: Path) -> None:
    keras.config.set_floatx("float64")
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    hvd.init()
    heads = {
        "eager": none_on_some(False, False), "function": none_on_some(True, False), "tape": none_on_some(False, True),
        "tape in a function": none_on_some(True, True), "as dense": none_on_some(True, False, sparse_as_dense=True),
        "tape, as dense": none_on_some(False, True, sparse_as_dense=True),
        "groups": none_on_some(True, False, groups=2), "tape, groups": none_on_some(True, True, groups=2),
        "omitted": both.omitted(), "fit": one_task_each(), "in a set": in_a_set(),
    }  # fmt: skip
    clips = {f"{op}, {traced}": clipped(op, traced) for op in (hvd_tf.Sum, hvd_tf.Average) for traced in (True, False)}
    found = {
        "None on some ranks": heads, "copies": both.copies(), "kept": kept(), "clipped": clips,
        "first step": first_step(),
        "passes": {"eager": passes(False), "function": passes(True)}, "one more": both.one_more(),
        "in functions": {"twice": twice()}, "16 bits": in_16_bits(), "refused": refusals(),
    }  # fmt: skip
    hvd_tf.allreduce(tf.constant(0.0), name="all were told")  # who leaves ends the others' waiting
    (folder / f"{hvd.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
