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
from jobs import RANK, SIZE, O, case, cases, compiled, data, fit, fitted, hvk, run_cases

import hvdtrain

LR8 = {"lr": hvdtrain.LR(0.1, 8), "per_rank_batch": 8}
DECAYING = O.schedules.ExponentialDecay(0.1, 2, 0.5)


def stock(optimizer: Any) -> Any:
    import horovod.keras as horovod_keras

    return compiled(horovod_keras.DistributedOptimizer(optimizer))


cases(
    unwrapped_verify=lambda: hvk.verify(compiled()),
    unwrapped_fit=lambda: fitted(compiled(), data()),
    stock=lambda: hvk.verify(stock(O.SGD(0.1))),
    stock_adam_fit=lambda: fitted(stock(O.Adam(1e-2)), data()),
    # without hvk.callbacks: nobody makes the replicas equal
    forgotten_broadcast=lambda: fit(hvk.prepare(compiled(seed=RANK))),
    forgotten_broadcast_verify=lambda: hvk.verify(hvk.prepare(compiled(seed=RANK))),
    unequal_rate=lambda: fitted(hvk.prepare(compiled(O.SGD(0.1 * (RANK + 1)))), data()),
    unequal_momentum=lambda: hvk.verify(hvk.prepare(compiled(O.SGD(0.1, momentum=0.5 + 0.1 * RANK)))),
    # rank-dependent arithmetic after the average: the update is not that of the mean; a sum where a mean belongs
    averaged_then_changed=lambda: changed_after_the_average(RANK + 1.0),
    summed=lambda: changed_after_the_average(float(SIZE)),
    epochs_differ=lambda: fitted(hvk.prepare(compiled()), data(), epochs=1 + RANK),
    scaled_twice=lambda: hvk.prepare(compiled(O.SGD(0.2)), **LR8),
    two_schedules=lambda: hvk.prepare(compiled(O.SGD(DECAYING)), **LR8),
    rate_without_batch=lambda: hvk.prepare(compiled(), lr=hvdtrain.LR(0.1, 8)),
    batch_said_twice=lambda: hvk.prepare(compiled(), data(8), per_rank_batch=8),
    prepared_with_arrays=lambda: hvk.prepare(compiled(), images(8), lr=hvdtrain.LR(0.1, 8)),
    data_in_a_list=lambda: hvk.loader(list(images(8)), 8),
    not_compiled=lambda: hvk.prepare(cnn()),
    unknown_compression=lambda: hvk.prepare(compiled(), compression="int3"),
    evaluates_replicas_that_differ=lambda: hvk.evaluate(
        compiled(seed=RANK), (images(8)[0].astype("float32"), images(8)[1]), per_rank_batch=8
    ),
)


@case
def callbacks_made_after_fit_is_looked_up() -> str:
    model = compiled(hvk.prepare(O.SGD(0.1)))
    model.fit(data(), verbose=0, callbacks=hvk.callbacks(model))
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
def unequal_model() -> str:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([L.Input((6, 6, 1)), L.Flatten(), dense(4 + RANK), dense(4)])
    model.compile(O.SGD(0.1), loss())
    fitted(hvk.prepare(model), data())
    return "trained"


@case
def unhooked_on_one_rank() -> str:
    model = compiled()
    if RANK == 0:
        hvk.prepare(model)
    else:
        vars(model)["_hvdtrain"] = vars(hvk.prepare(compiled()))["_hvdtrain"]
    return str(hvk.verify(model))


def changed_after_the_average(factor: float) -> Any:
    model = hvk.prepare(compiled())
    hooked = vars(model.optimizer)["apply"]
    vars(model.optimizer)["apply"] = lambda grads, tv=None: hooked([g * factor for g in grads], tv)
    return hvk.verify(model)


@case
def steps_differ() -> str:
    x, y = (part[: 16 + 8 * RANK] for part in images(32))
    fitted(hvk.prepare(compiled()), x, y, batch_size=8)
    return "trained"


@case
def watch_catches() -> str:
    """One bit of one variable changes on one rank in mid-training."""
    model = hvk.prepare(compiled(O.Adam(1e-2)), watch_every=2)
    fitted(model, data(), epochs=4, more=[Poke(model, 3)])
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


if __name__ == "__main__":
    run_cases("catches")
