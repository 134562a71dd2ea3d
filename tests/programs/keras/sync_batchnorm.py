"""Batch normalisation over all ranks, beside plain Keras on all samples in the same process, in float64.

usage: sync_batchnorm.py FOLDER        writes FOLDER/sync_batchnorm.rankR.json: case -> "passed ..." or the error's text
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
from common import BACKEND, L, apart, in_float64, loss, weights_of
from jobs import RANK, SIZE, O, case, hvk, run_cases, world

import hvdtrain
from hvdtrain.keras.backends.chosen import BACKEND as TENSORS

in_float64()
RNG = np.random.default_rng(6)
X, Y = RNG.normal(size=(60, 5)) * 3.0 + 1.0, RNG.integers(0, 3, 60)
TOKENS = RNG.integers(1, 9, (60, 4)) * (np.arange(4) < RNG.integers(1, 5, (60, 1)))
BATCH = 6 * SIZE
TAIL = 2 * BATCH + 1  # two full steps, and one in which one rank has a sample
EXACT = 1e-10
STEPS = 2 if BACKEND == "tensorflow" else 1  # of an execution: Keras on torch refuses others


def norm(**options: Any) -> Any:
    return L.BatchNormalization(momentum=0.7, **options)


def net(layers: Any, optimizer: Any = None, **compile: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([L.Input((5,)), L.Dense(4), *layers, L.Dense(3)])
    model.compile(optimizer or O.SGD(0.3), loss(), jit_compile=False, **compile)
    return model


def fitted(model: keras.Model, x: Any, y: Any, **options: Any) -> Any:
    data = hvk.loader((x, y), BATCH // SIZE, shuffle=False)
    hvk.prepare(model, data, **options)
    return model.fit(data, epochs=2, verbose=0, callbacks=hvk.callbacks(model)).history["loss"]


def plain_fitted(model: keras.Model, x: Any, y: Any) -> Any:
    model.run_eagerly = True  # tracing takes longer than these steps
    return model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0).history["loss"]


def parity(make: Any, x: Any = X[:TAIL], y: Any = Y[:TAIL], exact: float = EXACT, **options: Any) -> str:
    """The losses, weights and moving statistics after two epochs."""
    model, plain = make(), make()
    losses, expected = fitted(model, x, y, **(options or {"sync_batchnorm": True})), plain_fitted(plain, x, y)
    gap = max(apart(weights_of(model), weights_of(plain)), apart(losses, expected))
    assert gap < exact, (gap, losses, expected)
    return f"{gap:.1e}"


@case
def a_rank_without_samples() -> str:
    """Pictures, two layers, statistics of channels that come first and last."""
    pictures = RNG.normal(size=(TAIL, 4, 4, 2)) * np.arange(1, TAIL + 1)[:, None, None, None]

    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        layers = [L.Conv2D(3, 2), norm(), L.Activation("relu"), L.Conv2D(2, 2), norm(axis=1), L.Flatten(), L.Dense(3)]
        model = keras.Sequential([L.Input((4, 4, 2)), *layers])
        model.compile(O.SGD(0.05), loss(), jit_compile=False)
        return model

    found = parity(make, pictures)
    model, plain = hvk.prepare(make(), sync_batchnorm=True), make()
    evaluated = hvk.evaluate(model, (pictures, Y[:TAIL]), per_rank_batch=4)["loss"]
    assert abs(evaluated - plain.evaluate(pictures, Y[:TAIL], batch_size=4, verbose=0)) < EXACT
    return found


@case
def asked_for_by_the_layer() -> str:
    def make() -> keras.Model:
        layer = norm()
        layer.synchronized = BACKEND == "tensorflow"  # which Keras refuses on PyTorch
        return net([layer], O.SGD(0.1, momentum=0.9), steps_per_execution=STEPS)

    return parity(make, sync_batchnorm=BACKEND == "torch")


@case
def masks() -> str:
    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        layers = [L.Embedding(9, 4, mask_zero=True), norm(), L.GlobalAveragePooling1D(), L.Dense(3)]
        model = keras.Sequential([L.Input((4,), dtype="int32"), *layers])
        model.compile(O.SGD(0.3), loss(), run_eagerly=True)  # tracing takes longer than these steps
        return model

    return parity(make, TOKENS[:TAIL])


@case
def accumulated_called_twice_and_renormalised() -> str:
    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        here = keras.Input((5,))
        wide, shared = L.Dense(4), norm(renorm=True, renorm_clipping={"rmax": 3.0, "rmin": 0.3, "dmax": 5.0})
        joined = shared(wide(here)) + shared(wide(here * here))
        model = keras.Model(here, L.Dense(3)(joined))
        model.compile(O.SGD(0.1, gradient_accumulation_steps=3), loss(), jit_compile=False)
        return model

    return parity(make)


@case
def mixed_precision() -> str:
    """As near to one process as the activations' half precision lets it."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return parity(lambda: net([norm()]), X[:TAIL].astype("float32"), exact=2e-2)
    finally:
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")


@case
def plain_files_and_plain_again() -> str:
    """Nothing of it is saved; preparing again takes it off, and each rank then goes by its own samples."""
    names: list[str] = []
    asked = TENSORS.differentiable_sum

    def noted(values: Any, samples: Any, name: str) -> Any:
        names.append(name.split(".batchnorm.")[1])
        return asked(values, samples, name)

    vars(TENSORS)["differentiable_sum"] = noted
    model = net([norm()])
    fitted(model, X[:BATCH], Y[:BATCH], sync_batchnorm=True)
    del vars(TENSORS)["differentiable_sum"]
    backward = ["0.0.gradient"] if BACKEND == "tensorflow" else ["0.0"]  # traced once; eager, two epochs
    assert names == ["0.0", *backward], names
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder, "model.keras"))
        loaded = keras.models.load_model(Path(folder, "model.keras"), compile=False)
    assert loaded.layers[1].get_config()["synchronized"] is False
    assert "_moments" in vars(model.layers[1]) and "_moments" not in vars(loaded.layers[1])
    assert apart(weights_of(loaded), weights_of(model)) == 0
    again, unsynchronised = net([norm()], run_eagerly=True), net([norm()], run_eagerly=True)
    hvk.prepare(again, sync_batchnorm=True)
    fitted(again, X[:24], Y[:24])
    fitted(unsynchronised, X[:24], Y[:24])
    assert "_moments" not in vars(again.layers[1])
    assert apart(weights_of(again), weights_of(unsynchronised)) == 0
    plain = net([norm()])
    plain_fitted(plain, X[:24], Y[:24])
    off = apart(weights_of(again), weights_of(plain))
    assert off > 1e-3, off
    return "plain"


@case
def models_that_share_a_layer() -> str:
    """Two models of one body, prepared one after the other and trained in turns, batch by batch; of uneven parts.

    What TensorFlow sums over ranks (samples, elements of one shape) is a constant here unless that is prevented.
    """

    class Squares(keras.losses.Loss):
        def call(self, y: Any, predicted: Any) -> Any:
            return (keras.ops.expand_dims(keras.ops.cast(y, "float64"), -1) - predicted) ** 2

    mine = slice(3 * RANK, 3 * RANK + (3 if RANK < SIZE - 1 else 5))

    def trained(rows: slice, ours: bool) -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        body = keras.Sequential([L.Input((5,)), L.Dense(4), norm()])
        models = [keras.Sequential([body, L.Dense(3)]) for _ in range(2)]
        for model in models:
            model.compile(O.SGD(0.1), Squares(), jit_compile=False)
            if ours:
                hvk.prepare(model, sync_batchnorm=True)
        for _ in range(3):
            for model in models:
                model.train_on_batch(X[rows], Y[rows])
        return [value for model in models for value in weights_of(model)]

    gap = apart(trained(mine, True), trained(slice(0, 3 * SIZE + 2), False))
    assert gap < EXACT, gap
    return f"{gap:.1e}"


@case
def in_a_branch() -> str:
    if BACKEND == "torch":
        return "eager"
    import tensorflow as tf

    class Branching(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = norm(), L.Dense(3)

        def call(self, x: Any, training: bool = False) -> Any:
            x = tf.cond(tf.reduce_sum(x) > 0, lambda: self.norm(x, training=training), lambda: x)
            return self.out(x)

    keras.utils.set_random_seed(1)
    model = Branching()
    model(X[:6])
    model.compile(O.SGD(0.1), loss(), jit_compile=False)
    fitted(model, X[:24], Y[:24], sync_batchnorm=True)
    return "trained"


class Own(keras.layers.BatchNormalization):
    def _moments(self, inputs: Any, mask: Any) -> Any:
        return super()._moments(inputs, mask)


@case
def of_a_pytorch_module() -> str:
    """Keras counts its buffers as none of its variables: they are not synchronised, and end equal on all ranks: as the
    mean of what the ranks' own samples give, of which one rank has none in the last step."""
    if BACKEND != "torch":
        return "tensorflow has none"
    import torch

    def make() -> keras.Model:
        # two values of each channel in a single sample, which a rank may have, or none
        module = torch.nn.Sequential(
            torch.nn.Unflatten(1, (2, 2)), torch.nn.BatchNorm1d(2), torch.nn.Flatten()
        ).double()
        return net([L.TorchModuleWrapper(module)], O.SGD(1e-30))

    try:
        fitted(make(), X[:TAIL], Y[:TAIL], sync_batchnorm=True)
    except hvdtrain.ConfigError as error:
        assert "holds a PyTorch module with batch normalisation" in str(error), error
    else:
        raise AssertionError("sync_batchnorm=True was taken")

    def normal(model: keras.Model) -> torch.nn.Module:
        return next(layer for layer in model.layers if isinstance(layer, L.TorchModuleWrapper)).module[1]

    model, plain = make(), make()
    fitted(model, X[:TAIL], Y[:TAIL])
    everyones = world.gather(normal(model).running_mean.tolist())
    assert everyones == [everyones[0]] * SIZE, everyones
    before = torch.zeros(2, dtype=torch.float64)
    for _ in range(2):
        ends = []
        for rank in range(SIZE):
            normal(plain).running_mean.copy_(before)
            for step in range(0, TAIL, BATCH):
                mine = X[:TAIL][step + rank * 6 : min(step + (rank + 1) * 6, step + BATCH)]
                if len(mine):
                    plain(mine, training=True)
            ends.append(normal(plain).running_mean.clone())
        before = torch.stack(ends).mean(0)
    assert apart(everyones[0], before) < EXACT, (everyones[0], before)
    return f"{apart(everyones[0], before):.1e}"


@case
def a_ranks_own_batch_is_reported() -> str:
    for options in ({}, {"sync_batchnorm": True}):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            fitted(net([norm()], run_eagerly=True), X[:BATCH], Y[:BATCH], **options)
        own = "1 batch-norm layer(s) use each rank's own batch" in out.getvalue()
        assert own is (RANK == 0 and not options), out.getvalue()
    return "passed"


@case
def statistics_of_its_own() -> str:
    hvk.prepare(net([Own(name="own")]), sync_batchnorm=True)
    return "prepared"


@case
def an_optimizer_alone() -> str:
    hvk.prepare(O.SGD(0.1), sync_batchnorm=True)
    return "prepared"


if __name__ == "__main__":
    assert world.size == SIZE
    run_cases("sync_batchnorm")
