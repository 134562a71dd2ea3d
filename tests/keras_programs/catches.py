"""Jobs that would train silently wrong, one after the other in the same ranks: each must be refused by all of
them.

usage: catches.py FOLDER        writes FOLDER/catches.rankR.json: case -> "passed ..." or the error's text
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from common import BACKEND, L, cnn, dense, images, loss, numpy_of, report, tokens

import hvdtrain

world = hvdtrain.init("keras", seed=5)
import hvdtrain.keras as hvk  # noqa: E402  (the adapter joins the ranks first)

RANK, SIZE = world.rank, world.size
O = keras.optimizers  # noqa: E741


def compiled(optimizer: Any = None, *, seed: int = 0, **arguments: Any) -> keras.Model:
    keras.utils.set_random_seed(seed)
    model = cnn()
    model.compile(optimizer or O.SGD(0.1), loss(), **arguments)
    return model


def data(batch: int = 8, samples: int = 32) -> Any:
    x, y = images(samples)
    return hvk.batches(x.astype("float32"), y, batch)


def fit(model: keras.Model, callbacks: list[Any] | None = None, epochs: int = 1, batches: Any = None) -> Any:
    return model.fit(batches or data(), epochs=epochs, verbose=0, callbacks=callbacks)


# -------------------------------------------------------------------- the cases
def right() -> str:
    model = hvk.prepare(compiled())
    before = [numpy_of(v).tobytes() for v in state(model)]
    proof = hvk.verify(model)
    assert [numpy_of(v).tobytes() for v in state(model)] == before, "verify changed something"
    return f"{proof.seconds:.3f} {proof}"


def state(model: keras.Model) -> list[Any]:
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return [*model.variables, *model.optimizer.variables]


def restored_after_training() -> str:
    """In the middle of training (slots, counters, metrics, accumulators, seeds in use) verify leaves no
    trace.
    """
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [L.Input((6, 6, 1)), L.Flatten(), dense(8), L.BatchNormalization(), L.Dropout(0.5, seed=1), dense(4)]
    )
    model.compile(O.Adam(1e-2, clipnorm=1.0, use_ema=True, gradient_accumulation_steps=3), loss(), metrics=["accuracy"])
    hvk.prepare(model)
    fit(model, hvk.callbacks(model), epochs=2)
    before = [numpy_of(v).tobytes() for v in state(model)]
    hvk.verify(model)
    after = [numpy_of(v).tobytes() for v in state(model)]
    changed = [v.path for v, a, b in zip(state(model), before, after, strict=True) if a != b]
    assert not changed, changed
    return "unchanged"


def other_data_order() -> str:
    """A rank that reads its samples in another order is no error."""
    model = hvk.prepare(compiled())
    x, y = images(32)
    order = np.random.default_rng(RANK).permutation(16)
    mine = slice(RANK * 16, RANK * 16 + 16)
    model.fit(x[mine][order], y[mine][order], batch_size=8, verbose=0, callbacks=hvk.callbacks(model))
    return str(vars(model)["_hvdtrain"].proof)


def unwrapped_verify() -> str:
    return str(hvk.verify(compiled()))


def unwrapped_fit() -> str:
    model = compiled()
    fit(model, hvk.callbacks(model))
    return "trained"


def recompiled() -> str:
    model = hvk.prepare(compiled())
    model.compile(O.SGD(0.1), loss())
    fit(model)
    return "trained"


def cloned_optimizer() -> str:
    model = hvk.prepare(compiled())
    model.optimizer = O.SGD.from_config(model.optimizer.get_config())
    fit(model, hvk.callbacks(model))
    return "trained"


def stock() -> str:
    import horovod.tensorflow.keras as horovod_keras

    return str(hvk.verify(compiled(horovod_keras.DistributedOptimizer(O.SGD(0.1)))))


def stock_adam_fit() -> str:
    import horovod.tensorflow.keras as horovod_keras

    model = compiled(horovod_keras.DistributedOptimizer(O.Adam(1e-2)))
    fit(model, hvk.callbacks(model))
    return "trained"


def forgotten_broadcast() -> str:
    model = hvk.prepare(compiled(seed=RANK))
    fit(model)  # without hvk.callbacks: nobody makes the replicas equal
    return "trained"


def forgotten_broadcast_verify() -> str:
    return str(hvk.verify(hvk.prepare(compiled(seed=RANK))))


def unequal_rate() -> str:
    model = hvk.prepare(compiled(O.SGD(0.1 * (RANK + 1))))
    fit(model, hvk.callbacks(model))
    return "trained"


def unequal_momentum() -> str:
    return str(hvk.verify(hvk.prepare(compiled(O.SGD(0.1, momentum=0.5 + 0.1 * RANK)))))


def unequal_model() -> str:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([L.Input((6, 6, 1)), L.Flatten(), dense(4 + RANK), dense(4)])
    model.compile(O.SGD(0.1), loss())
    hvk.prepare(model)
    fit(model, hvk.callbacks(model))
    return "trained"


def unhooked_on_one_rank() -> str:
    model = compiled()
    if RANK == 0:
        hvk.prepare(model)
    else:
        vars(model)["_hvdtrain"] = vars(hvk.prepare(compiled()))["_hvdtrain"]
    return str(hvk.verify(model))


def averaged_then_changed() -> str:
    """Rank-dependent arithmetic after the average: the update is not that of the mean."""
    model = hvk.prepare(compiled(O.SGD(0.1)))
    hooked = vars(model.optimizer)["apply"]
    vars(model.optimizer)["apply"] = lambda grads, tv=None: hooked([g * (RANK + 1.0) for g in grads], tv)
    return str(hvk.verify(model))


def summed() -> str:
    """A sum where a mean belongs."""
    model = hvk.prepare(compiled(O.SGD(0.1)))
    hooked = vars(model.optimizer)["apply"]
    vars(model.optimizer)["apply"] = lambda grads, tv=None: hooked([g * float(SIZE) for g in grads], tv)
    return str(hvk.verify(model))


def steps_differ() -> str:
    model = hvk.prepare(compiled())
    x, y = images(32)
    mine = slice(0, 16 + 8 * RANK)
    model.fit(x[mine], y[mine], batch_size=8, verbose=0, callbacks=hvk.callbacks(model))
    return "trained"


def epochs_differ() -> str:
    model = hvk.prepare(compiled())
    fit(model, hvk.callbacks(model), epochs=1 + RANK)
    return "trained"


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


def watch_silent() -> str:
    model = hvk.prepare(compiled(O.Adam(1e-2)), watch_every=1)
    fit(model, hvk.callbacks(model), epochs=3)
    return "quiet"


def inf_on_one_rank() -> str:
    """An overflow on one rank: all ranks skip that step, and halve the same loss scale."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compiled(O.Adam(1e-3))
        hvk.prepare(model)
        x, y = images(64)
        mine = slice(RANK * 32, RANK * 32 + 32)
        x = x.astype("float32")
        if RANK == SIZE - 1:
            x[RANK * 32 + 9] = np.inf  # in its second batch
        model.fit(x[mine], y[mine], batch_size=8, shuffle=False, verbose=0, callbacks=hvk.callbacks(model))
        return inf_report(model)
    finally:
        keras.config.set_dtype_policy("float32")


def inf_report(model: keras.Model) -> str:
    optimizer = model.optimizer
    finite = all(np.isfinite(numpy_of(v)).all() for v in model.weights)
    prints = set(world.gather(hvk.fingerprint(model)))
    scale = float(numpy_of(optimizer.dynamic_scale))
    updates = int(numpy_of(optimizer.inner_optimizer.iterations))
    return f"scale {scale:g} updates {updates} finite {finite} equal {len(prints) == 1}"


def inf_while_accumulating() -> str:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compiled(O.Adam(1e-3, gradient_accumulation_steps=2, clipnorm=1.0))
        hvk.prepare(model)
        x, y = images(64)
        x = x.astype("float32")
        if RANK == SIZE - 1:
            x[RANK * 32 + 9] = np.inf
        mine = slice(RANK * 32, RANK * 32 + 32)
        model.fit(x[mine], y[mine], batch_size=8, shuffle=False, verbose=0, callbacks=hvk.callbacks(model))
        return inf_report(model)
    finally:
        keras.config.set_dtype_policy("float32")


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


def optimizer_inside_loss_scale_with_callbacks() -> str:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compiled(hvk.prepare(O.SGD(0.1)))
        fit(model, hvk.callbacks(model))
        return str(vars(model)["_hvdtrain"].proof)
    finally:
        keras.config.set_dtype_policy("float32")


def accumulation_inside_multi() -> str:
    inner = O.OptimizerMap(O.SGD(0.05, gradient_accumulation_steps=2), {".*kernel": O.Adam(1e-2)})
    hvk.prepare(compiled(O.MultiOptimizer(inner)))
    return "prepared"


def scaled_twice() -> str:
    hvk.prepare(compiled(O.SGD(0.2)), lr=hvdtrain.LR(0.1, 8), per_rank_batch=8)
    return "prepared"


def two_schedules() -> str:
    model = compiled(O.SGD(O.schedules.ExponentialDecay(0.1, 2, 0.5)))
    hvk.prepare(model, lr=hvdtrain.LR(0.1, 8), per_rank_batch=8)
    return "prepared"


def rate_without_batch() -> str:
    hvk.prepare(compiled(O.SGD(0.1)), lr=hvdtrain.LR(0.1, 8))
    return "prepared"


def rate_follows_samples() -> str:
    """The rate of each update, as a function of the samples seen before it."""
    lr = hvdtrain.LR(0.1, 8, warmup_samples=48, schedule="step", milestones=(64,))
    model = hvk.prepare(compiled(O.SGD(0.1)), lr=lr, per_rank_batch=8)
    seen: list[float] = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(round(float(numpy_of(model.optimizer.learning_rate)), 6))

    batches = data()
    model.fit(batches, epochs=3, verbose=0, callbacks=[*hvk.callbacks(model, plan=batches.plan), Look()])
    expected = [round(lr.at(step * 8 * SIZE, 8 * SIZE), 6) for step in range(len(seen))]
    assert np.allclose(seen, expected, rtol=1e-5), (seen, expected)
    return f"{len(seen)} rates"


def not_compiled() -> str:
    hvk.prepare(cnn())
    return "prepared"


def unknown_compression() -> str:
    hvk.prepare(compiled(), compression="int3")
    return "prepared"


def dropout_streams() -> str:
    """Ranks draw different masks, which follow from the seed alone."""
    keras.utils.set_random_seed(3 + RANK)
    model = keras.Sequential([L.Input((64,)), L.Dropout(0.5, seed=4), L.Dropout(0.5)])
    model.add(dense(4))
    model.compile(O.SGD(0.0), loss())
    hvk.prepare(model)
    x = np.ones((32, 64), "float32")
    mine = slice(RANK * 8, RANK * 8 + 8)
    model.fit(x[mine], np.zeros(8, "int64"), batch_size=8, verbose=0, callbacks=hvk.callbacks(model))
    mask = numpy_of(model.layers[1](model.layers[0](np.ones((1, 64), "float32"), training=True), training=True)) > 0
    masks = world.gather(mask.tobytes().hex())
    return f"{len(set(masks))} masks {masks[0][:32]}"


def evaluates_each_sample_once() -> str:
    x, y = tokens(37)  # 37 over the ranks: uneven shards
    keras.utils.set_random_seed(2)
    model = keras.Sequential([L.Input((5,)), dense(4)])
    model.compile(O.SGD(0.1), loss(), metrics=["accuracy"])
    hvk.prepare(model)
    x = x.astype("float32") / 20
    together = hvk.evaluate(model, x, y, 8)
    alone = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    assert abs(together["loss"] - alone["loss"]) < 1e-5 and abs(together["accuracy"] - alone["accuracy"]) < 1e-6, (
        together,
        alone,
    )
    few = hvk.evaluate(model, x[:1], y[:1], 8)  # fewer samples than ranks
    one = model.evaluate(x[:1], y[:1], verbose=0, return_dict=True)
    assert abs(few["loss"] - one["loss"]) < 1e-5, (few, one)
    return "equal"


def watch_cost() -> str:
    """Seconds of a comparison of the replicas."""
    keras.utils.set_random_seed(2)
    model = keras.Sequential([L.Input((512,)), L.Dense(512), L.Dense(512), L.Dense(512)])
    model.compile(O.Adam(1e-3), "mse")
    hvk.prepare(model)
    hvk.verify(model)
    from hvdtrain.keras import _state
    from hvdtrain.keras._backend import BACKEND as backend

    variables = _state.replicated(model)
    checksums = backend.make_checksums(variables)
    _state.check_equal(variables, world, checksums, when="now")
    started = time.perf_counter()
    for _ in range(5):
        _state.check_equal(variables, world, checksums, when="now")
    return f"{(time.perf_counter() - started) / 5:.5f}"


CASES: list[Callable[[], str]] = [
    right,
    restored_after_training,
    other_data_order,
    unwrapped_verify,
    unwrapped_fit,
    recompiled,
    cloned_optimizer,
    forgotten_broadcast,
    forgotten_broadcast_verify,
    unequal_rate,
    unequal_momentum,
    unequal_model,
    unhooked_on_one_rank,
    averaged_then_changed,
    summed,
    steps_differ,
    epochs_differ,
    watch_catches,
    watch_silent,
    inf_on_one_rank,
    inf_while_accumulating,
    optimizer_inside_loss_scale,
    optimizer_inside_loss_scale_with_callbacks,
    accumulation_inside_multi,
    scaled_twice,
    two_schedules,
    rate_without_batch,
    rate_follows_samples,
    not_compiled,
    unknown_compression,
    dropout_streams,
    evaluates_each_sample_once,
    watch_cost,
]
if BACKEND == "tensorflow":  # Horovod's own Keras wrapper is TensorFlow's
    CASES += [stock, stock_adam_fit]

if __name__ == "__main__":
    outcomes: dict[str, str] = {}
    for case in CASES:
        try:
            outcomes[case.__name__] = f"passed {case()}"
        except hvdtrain.HvdtrainError as error:
            outcomes[case.__name__] = f"{type(error).__name__}: {error}"
        except Exception:
            print(f"rank {RANK}: case {case.__name__}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            report(sys.argv[1], "catches", RANK, outcomes)
            os._exit(3)
        keras.backend.clear_session()
    report(sys.argv[1], "catches", RANK, outcomes)
    world.barrier()
    world.comm.shutdown()
