"""Jobs that would train silently wrong, one after the other in the same ranks: each must be refused by all of
them. Those of ``accepted.py`` run along.

usage: catches.py FOLDER        writes FOLDER/catches.rankR.json: case -> "passed ..." or the error's text
"""

from __future__ import annotations

from typing import Any

import accepted  # noqa: F401  (its cases)
import keras
import numpy as np
from common import L, cnn, dense, images, loss, numpy_of
from jobs import RANK, SIZE, O, case, compiled, data, fit, hvk, run_cases

import hvdtrain


@case
def unwrapped_verify() -> str:
    return str(hvk.verify(compiled()))


@case
def unwrapped_fit() -> str:
    model = compiled()
    fit(model, hvk.callbacks(model))
    return "trained"


@case
def recompiled() -> str:
    model = hvk.prepare(compiled())
    model.compile(O.SGD(0.1), loss())
    fit(model)
    return "trained"


@case
def cloned_optimizer() -> str:
    model = hvk.prepare(compiled())
    model.optimizer = O.SGD.from_config(model.optimizer.get_config())
    fit(model, hvk.callbacks(model))
    return "trained"


@case
def stock() -> str:
    import horovod.keras as horovod_keras

    return str(hvk.verify(compiled(horovod_keras.DistributedOptimizer(O.SGD(0.1)))))


@case
def stock_adam_fit() -> str:
    import horovod.keras as horovod_keras

    model = compiled(horovod_keras.DistributedOptimizer(O.Adam(1e-2)))
    fit(model, hvk.callbacks(model))
    return "trained"


@case
def forgotten_broadcast() -> str:
    model = hvk.prepare(compiled(seed=RANK))
    fit(model)  # without hvk.callbacks: nobody makes the replicas equal
    return "trained"


@case
def forgotten_broadcast_verify() -> str:
    return str(hvk.verify(hvk.prepare(compiled(seed=RANK))))


@case
def unequal_rate() -> str:
    model = hvk.prepare(compiled(O.SGD(0.1 * (RANK + 1))))
    fit(model, hvk.callbacks(model))
    return "trained"


@case
def unequal_momentum() -> str:
    return str(hvk.verify(hvk.prepare(compiled(O.SGD(0.1, momentum=0.5 + 0.1 * RANK)))))


@case
def unequal_model() -> str:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([L.Input((6, 6, 1)), L.Flatten(), dense(4 + RANK), dense(4)])
    model.compile(O.SGD(0.1), loss())
    hvk.prepare(model)
    fit(model, hvk.callbacks(model))
    return "trained"


@case
def unhooked_on_one_rank() -> str:
    model = compiled()
    if RANK == 0:
        hvk.prepare(model)
    else:
        vars(model)["_hvdtrain"] = vars(hvk.prepare(compiled()))["_hvdtrain"]
    return str(hvk.verify(model))


@case
def averaged_then_changed() -> str:
    """Rank-dependent arithmetic after the average: the update is not that of the mean."""
    model = hvk.prepare(compiled(O.SGD(0.1)))
    hooked = vars(model.optimizer)["apply"]
    vars(model.optimizer)["apply"] = lambda grads, tv=None: hooked([g * (RANK + 1.0) for g in grads], tv)
    return str(hvk.verify(model))


@case
def summed() -> str:
    """A sum where a mean belongs."""
    model = hvk.prepare(compiled(O.SGD(0.1)))
    hooked = vars(model.optimizer)["apply"]
    vars(model.optimizer)["apply"] = lambda grads, tv=None: hooked([g * float(SIZE) for g in grads], tv)
    return str(hvk.verify(model))


@case
def steps_differ() -> str:
    model = hvk.prepare(compiled())
    x, y = images(32)
    mine = slice(0, 16 + 8 * RANK)
    model.fit(x[mine], y[mine], batch_size=8, verbose=0, callbacks=hvk.callbacks(model))
    return "trained"


@case
def epochs_differ() -> str:
    model = hvk.prepare(compiled())
    fit(model, hvk.callbacks(model), epochs=1 + RANK)
    return "trained"


@case
def watch_catches() -> str:
    """One bit of one variable changes on one rank in mid-training."""
    model = hvk.prepare(compiled(O.Adam(1e-2)), watch_every=2)
    fit(model, [*hvk.callbacks(model), Poke(model, 3)], epochs=4)
    return "trained"


class Poke(keras.callbacks.Callback):
    def __init__(self, model: keras.Model, at: int) -> None:
        super().__init__()
        self.poked, self.at, self.steps = model, at, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        if self.steps == self.at and RANK == SIZE - 1:
            variable = self.poked.trainable_variables[2]
            value = numpy_of(variable)
            value.reshape(-1)[5] = np.nextafter(value.reshape(-1)[5], np.inf, dtype=value.dtype)
            variable.assign(value)


@case
def optimizer_inside_loss_scale() -> str:
    """compile() wraps a prepared optimizer under mixed_float16; without the callbacks that cannot be put
    right.
    """
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compiled(hvk.prepare(O.SGD(0.1)))
        fit(model)
        return "trained"
    finally:
        keras.config.set_dtype_policy("float32")


@case
def accumulation_inside_multi() -> str:
    inner = O.OptimizerMap(O.SGD(0.05, gradient_accumulation_steps=2), {".*kernel": O.Adam(1e-2)})
    hvk.prepare(compiled(O.MultiOptimizer(inner)))
    return "prepared"


@case
def scaled_twice() -> str:
    hvk.prepare(compiled(O.SGD(0.2)), lr=hvdtrain.LR(0.1, 8), per_rank_batch=8)
    return "prepared"


@case
def two_schedules() -> str:
    model = compiled(O.SGD(O.schedules.ExponentialDecay(0.1, 2, 0.5)))
    hvk.prepare(model, lr=hvdtrain.LR(0.1, 8), per_rank_batch=8)
    return "prepared"


@case
def rate_without_batch() -> str:
    hvk.prepare(compiled(O.SGD(0.1)), lr=hvdtrain.LR(0.1, 8))
    return "prepared"


@case
def callbacks_made_after_fit_is_looked_up() -> str:
    model = compiled(hvk.prepare(O.SGD(0.1)))
    model.fit(data(), verbose=0, callbacks=hvk.callbacks(model))
    return "trained"


@case
def batch_said_twice() -> str:
    hvk.prepare(compiled(O.SGD(0.1)), data(8), per_rank_batch=8)
    return "prepared"


@case
def prepared_with_arrays() -> str:
    hvk.prepare(compiled(O.SGD(0.1)), images(8), lr=hvdtrain.LR(0.1, 8))
    return "prepared"


@case
def data_in_a_list() -> str:
    hvk.loader(list(images(8)), 8)
    return "prepared"


@case
def not_compiled() -> str:
    hvk.prepare(cnn())
    return "prepared"


@case
def unknown_compression() -> str:
    hvk.prepare(compiled(), compression="int3")
    return "prepared"


@case
def evaluates_replicas_that_differ() -> str:
    x, y = images(8)
    hvk.evaluate(compiled(seed=RANK), (x.astype("float32"), y), per_rank_batch=8)
    return "evaluated"


if __name__ == "__main__":
    run_cases("catches")
