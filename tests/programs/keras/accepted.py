"""Jobs that are right and must pass; each returns what it found out."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
from common import BACKEND, L, dense, images, loss, numpy_of, tokens
from jobs import RANK, SIZE, O, case, cases, compiled, data, fitted, hvk, state, world

import hvdtrain


@case
def right() -> str:
    model = hvk.prepare(compiled())
    before = [numpy_of(v).tobytes() for v in state(model)]
    proof = hvk.verify(model)
    assert [numpy_of(v).tobytes() for v in state(model)] == before, "verify changed something"
    return f"{proof.seconds:.3f} {proof}"


@case
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


@case
def watch_silent() -> str:
    model = hvk.prepare(compiled(O.Adam(1e-2)), watch_every=1)
    fitted(model, data(), epochs=3)
    return "quiet"


def overflowing(**options: Any) -> str:
    """An overflow on one rank: all ranks skip that step, and halve the same loss scale."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = hvk.prepare(compiled(O.Adam(1e-3, **options)))
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
        model = compiled(hvk.prepare(O.SGD(0.1)))
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


@case
def dropout_streams() -> str:
    """Ranks draw different masks, which follow from the seed alone."""
    keras.utils.set_random_seed(3 + RANK)
    model = keras.Sequential([L.Input((64,)), L.Dropout(0.5, seed=4), L.Dropout(0.5)])
    model.add(dense(4))
    model.compile(O.SGD(0.0), loss())
    hvk.prepare(model)
    x = np.full((8, 64), 1.0 + RANK, "float32")
    model.fit(x, np.zeros(8, "int64"), batch_size=8, verbose=0, callbacks=hvk.callbacks(model))
    mask = numpy_of(model.layers[1](model.layers[0](np.ones((1, 64), "float32"), training=True), training=True)) > 0
    masks = world.gather(mask.tobytes().hex())
    return f"{len(set(masks))} masks {masks[0][:32]}"


@case
def evaluates_each_sample_once() -> str:
    x, y = tokens(37)  # 37 over the ranks: uneven shards
    keras.utils.set_random_seed(2)
    model = keras.Sequential([L.Input((5,)), dense(4)])
    model.compile(O.SGD(0.1), loss(), metrics=["accuracy"])
    hvk.prepare(model)
    x = x.astype("float32") / 20
    together = hvk.evaluate(model, (x, y), per_rank_batch=8)
    alone = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    assert abs(together["loss"] - alone["loss"]) < 1e-5 and abs(together["accuracy"] - alone["accuracy"]) < 1e-6, (
        together,
        alone,
    )
    few = hvk.evaluate(model, (x[:1], y[:1]), per_rank_batch=8)  # fewer samples than ranks
    one = model.evaluate(x[:1], y[:1], verbose=0, return_dict=True)
    assert abs(few["loss"] - one["loss"]) < 1e-5, (few, one)
    return "equal"


@case
def watch_cost() -> str:
    """Seconds of a comparison of the replicas."""
    keras.utils.set_random_seed(2)
    model = keras.Sequential([L.Input((512,)), L.Dense(512), L.Dense(512), L.Dense(512)])
    model.compile(O.Adam(1e-3), "mse")
    hvk.prepare(model)
    hvk.verify(model)
    from hvdtrain.keras.backends.chosen import BACKEND as backend
    from hvdtrain.keras.state import replicas

    variables = replicas.replicated(model)
    checksums = backend.make_checksums(variables)
    replicas.check_equal(variables, world, checksums, when="now")
    started = time.perf_counter()
    for _ in range(5):
        replicas.check_equal(variables, world, checksums, when="now")
    return f"{(time.perf_counter() - started) / 5:.5f}"


@case
def two_optimizers() -> str:
    """A GAN's shape: a model without call(), two networks, two optimizers, both averaged."""
    keras.utils.set_random_seed(20 + RANK)

    class Pair(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first = keras.Sequential([L.Input((6,)), L.Dense(4)])
            self.second = keras.Sequential([L.Input((6,)), L.Dense(4)])
            self.built = BACKEND == "torch"  # there, plain Keras would try to build it through call()

        def compile(self, optimizer: Any, other: Any) -> None:
            super().compile(optimizer=optimizer)
            self.other = other

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            for network, optimizer in ((self.first, self.optimizer), (self.second, self.other)):
                step(network, optimizer, x, y)
            return {"steps": 1.0}

    model = Pair()
    model.compile(O.SGD(0.1), O.SGD(0.2))
    model.other.build(model.second.trainable_variables)
    model.optimizer.build(model.first.trainable_variables)
    hvk.prepare(model, verify=False)
    rng = np.random.default_rng(RANK)
    x, y = rng.normal(size=(16, 6)).astype("float32"), rng.normal(size=(16, 4)).astype("float32")
    fitted(model, x, y, batch_size=8)
    prints = set(world.gather(hvk.fingerprint(model)))
    assert len(prints) == 1, "the two networks differ over ranks"
    return "equal"


def step(network: Any, optimizer: Any, x: Any, y: Any) -> None:
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = keras.ops.mean((network(x) - y) ** 2)
        optimizer.apply(tape.gradient(value, network.trainable_variables), network.trainable_variables)
        return
    import torch

    network.zero_grad()
    keras.ops.mean((network(x) - y) ** 2).backward()
    with torch.no_grad():
        optimizer.apply([v.value.grad for v in network.trainable_variables], network.trainable_variables)
