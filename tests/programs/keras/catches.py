"""Jobs that would train silently wrong, one after the other in the same ranks: each must be refused by all of
them. Jobs that are right run along.

usage: catches.py FOLDER        writes FOLDER/catches.rankR.json: case -> "passed ..." or the error's text
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
import numpy as np
from common import L, cnn, images, loss, numpy_of
from jobs import RANK, SIZE, O, case, cases, compiled, data, fit, fitted, hvk, run_cases, state, world

import hvdtrain
from hvdtrain.comm.engines import SoloEngine

LR8 = {"lr": hvdtrain.LR(0.1, 8), "per_rank_batch": 8}
DECAYING = O.schedules.ExponentialDecay(0.1, 2, 0.5)


def stock() -> Any:
    import horovod.keras as horovod_keras

    return hvk.verify(compiled(horovod_keras.DistributedOptimizer(O.SGD(0.1))))


cases(
    unwrapped_fit=lambda: fitted(compiled(), data()),
    stock=stock,
    # without hvk.callbacks: nobody makes the replicas equal
    forgotten_broadcast=lambda: fit(hvk.prepare(compiled(seed=RANK, traced=True))),
    unequal_rate=lambda: fitted(hvk.prepare(compiled(O.SGD(0.1 * (RANK + 1)))), data()),
    # rank-dependent arithmetic after the average: the update is not that of the mean; a sum where a mean belongs
    averaged_then_changed=lambda: changed_after_the_average(RANK + 1.0),
    summed=lambda: changed_after_the_average(float(SIZE)),
    scaled_twice=lambda: hvk.prepare(compiled(O.SGD(0.2)), **LR8),
    two_schedules=lambda: hvk.prepare(compiled(O.SGD(DECAYING)), **LR8),
    rate_without_batch=lambda: hvk.prepare(compiled(), lr=hvdtrain.LR(0.1, 8)),
    batch_said_twice=lambda: hvk.prepare(compiled(), data(8), per_rank_batch=8),
    prepared_with_arrays=lambda: hvk.prepare(compiled(), images(8), lr=hvdtrain.LR(0.1, 8)),
    data_in_a_list=lambda: hvk.loader(list(images(8)), 8),
    learning_rate_of_a_number=lambda: hvk.prepare(compiled(), learning_rate=0.1),
    world_of_torch=lambda: hvk.loader(images(8), 8, world=replace(world, comm=SoloEngine())),
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
def callbacks_of_one_rank() -> str:
    model = hvk.prepare(compiled())
    model.fit(data(), verbose=0, callbacks=hvk.callbacks(model) if RANK == 0 else [])
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
    model = keras.Sequential([L.Input((6, 6, 1)), L.Flatten(), L.Dense(4 + RANK), L.Dense(4)])
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
        model = compiled(hvk.prepare(O.SGD(0.1)), traced=True)
        fit(model)
        return "trained"
    finally:
        keras.config.set_dtype_policy("float32")


@case
def accumulation_inside_multi() -> str:
    inner = O.OptimizerMap(O.SGD(0.05, gradient_accumulation_steps=2), {".*kernel": O.Adam(1e-2)})
    hvk.prepare(compiled(O.MultiOptimizer(inner)))
    return "prepared"


# ---------------------------------------------------------------------------- right
@case
def right() -> str:
    model = hvk.prepare(compiled())
    before = [numpy_of(v).tobytes() for v in state(model)]
    proof = hvk.verify(model)
    assert [numpy_of(v).tobytes() for v in state(model)] == before, "verify changed something"
    assert "max |gradient - mean| = 0 of the largest, replicas equal (sha256 " in str(proof), proof
    return "unchanged"


@case
def restored_after_training() -> str:
    """In the middle of training (slots, counters, metrics, accumulators, seeds in use) verify leaves no
    trace.
    """
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [L.Input((6, 6, 1)), L.Flatten(), L.Dense(8), L.BatchNormalization(), L.Dropout(0.5, seed=1), L.Dense(4)]
    )
    optimizer = O.Adam(1e-2, clipnorm=1.0, use_ema=True, gradient_accumulation_steps=3)
    model.compile(optimizer, loss(), metrics=["accuracy"], run_eagerly=True)
    hvk.prepare(model)
    fitted(model, data(), epochs=2)
    before = [numpy_of(v).tobytes() for v in state(model)]
    hvk.verify(model)
    after = [numpy_of(v).tobytes() for v in state(model)]
    changed = [v.path for v, a, b in zip(state(model), before, after, strict=True) if a != b]
    assert not changed, changed
    return "unchanged"


@case
def other_data_order() -> str:
    """A rank that reads its samples in another order is no error."""
    model = hvk.prepare(compiled())
    x, y = images(32)
    order = np.random.default_rng(RANK).permutation(16)
    mine = slice(RANK * 16, RANK * 16 + 16)
    model.fit(x[mine][order], y[mine][order], batch_size=8, verbose=0, callbacks=hvk.callbacks(model))
    return str(vars(model)["_hvdtrain"].proofs.proof)


def overflowing(**options: Any) -> str:
    """An overflow on one rank: all ranks skip that step, and halve the same loss scale."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = hvk.prepare(compiled(O.Adam(1e-3, **options), traced=True))
        x, y = images(64)
        x, mine = x.astype("float32"), slice(RANK * 32, RANK * 32 + 32)
        if RANK == SIZE - 1:
            x[RANK * 32 + 9] = np.inf  # in its second batch
        fitted(model, x[mine], y[mine], batch_size=8, shuffle=False)
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = model.optimizer
    finite = all(np.isfinite(numpy_of(v)).all() for v in model.weights)
    equal = len(set(world.gather(hvk.fingerprint(model)))) == 1
    scale, updates = float(numpy_of(optimizer.dynamic_scale)), int(numpy_of(optimizer.inner_optimizer.iterations))
    return f"scale {scale:g} updates {updates} finite {finite} equal {equal}"


cases(
    inf_on_one_rank=overflowing, inf_while_accumulating=lambda: overflowing(gradient_accumulation_steps=2, clipnorm=1.0)
)


@case
def optimizer_inside_loss_scale_with_callbacks() -> str:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compiled(hvk.prepare(O.SGD(0.1)), traced=True)
        fitted(model, data())
        return str(vars(model)["_hvdtrain"].proofs.proof)
    finally:
        keras.config.set_dtype_policy("float32")


@case
def rate_follows_samples() -> str:
    """The rate of each update, as a function of the samples seen before it."""
    lr = hvdtrain.LR(0.1, 8, warmup_samples=48, schedule="step", milestones=(64,))
    batches = data()
    model = hvk.prepare(compiled(O.SGD(0.1)), batches, lr=lr)
    seen: list[float] = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: seen.append(round(float(numpy_of(model.optimizer.learning_rate)), 6))
    )
    fitted(model, batches, epochs=3, more=[look])
    expected = [round(lr.at(step * 8 * SIZE, 8 * SIZE), 6) for step in range(len(seen))]
    assert np.allclose(seen, expected, rtol=1e-5), (seen, expected)
    return f"{len(seen)} rates"


if __name__ == "__main__":
    run_cases("catches")
