"""Programs as Keras' own guides write them, each in plain Keras and with hvdtrain's documented changes, in float64.

usage: guides.py OUT.npz [program ...]     one process: plain Keras, nothing of hvdtrain; N ranks: an N-th of each batch

OUT.npz holds weights, history, evaluation and predictions of each program; of one process also "alone/...": trained on
rank 0's part of each batch, as by ranks that are not averaged.
"""

from __future__ import annotations

import csv
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from common import BACKEND, L, block, numpy_of, weights_of
from keras import ops

RANKED = int(os.environ.get("HOROVOD_SIZE", "1")) > 1
if RANKED:
    import hvdtrain

    world = hvdtrain.init("keras", seed=5)
    import hvdtrain.keras as hvk
else:
    block("horovod", "hvdtrain")
if BACKEND == "tensorflow":
    import tensorflow as tf
else:
    import torch

keras.config.set_floatx("float64")
RANKS = 2
BATCH = 12
K, O = keras.callbacks, keras.optimizers  # noqa: E741
RNG = np.random.default_rng(11)
ROWS = 29
X = RNG.normal(size=(ROWS, 5))
VALUE = X[:, :1] * X[:, 1:2] + RNG.normal(size=(ROWS, 1))
LABEL = RNG.integers(0, 3, ROWS)
WEIGHT = np.linspace(0.1, 3.0, ROWS)
STEPS = 6
LENGTH = 1 + (np.arange(ROWS) % BATCH) * STEPS // BATCH  # ranks' parts of a batch hold unlike numbers of tokens
TOKENS = np.where(np.arange(STEPS) < LENGTH[:, None], RNG.integers(1, 9, (ROWS, STEPS)), 0)
NEXT = np.where(np.arange(STEPS) < LENGTH[:, None], RNG.integers(1, 9, (ROWS, STEPS)), 0)
PICTURES = RNG.uniform(size=(ROWS, 4, 4, 1))
# in these plain Keras logs other losses of outputs where it is eager, or cannot run a metric of one's own
TRACED = ("several_inputs_and_outputs", "metric_of_ones_own", "metrics_of_the_whole_batch")
alone = False  # trains on rank 0's part of each batch
PROGRAMS: dict[str, tuple[Callable[..., Any], int]] = {}


def program(rows: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Of 25 rows the last batch has one: a rank has none; of 29 it has 5: ranks have 3 and 2."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[function.__name__] = function, rows
        return function

    return register


# -------------------------------------------------------------------- the documented changes, in one place
def cut(data: Any, rows: int) -> Any:
    return keras.tree.map_structure(lambda array: array[:rows], data)


def mine(data: Any) -> Any:
    """Returns what one process trains on, and its batch: all data, or rank 0's rows of each batch."""
    if not alone:
        return data, BATCH
    here = np.arange(len(keras.tree.flatten(data)[0])) % BATCH < BATCH // RANKS
    return keras.tree.map_structure(lambda array: array[here], data), BATCH // RANKS


def fit(model: Any, data: tuple[Any, ...], epochs: int = 2, *, val: Any = None, calls: Any = (), **prepare: Any) -> Any:
    """Trains on (x, y), (x, y, sample_weight) or (x,); returns the history."""
    options: dict[str, Any] = {"epochs": epochs, "verbose": 0}
    weights = {name: prepare.pop(name) for name in ("class_weight",) if name in prepare}
    if not RANKED:
        data, size = mine(data)
        if val is not None:
            options.update(validation_data=val, validation_batch_size=BATCH)
        x, y, sample_weight = (*data, None, None)[:3]
        return model.fit(
            x, y, sample_weight=sample_weight, batch_size=size, shuffle=False, callbacks=list(calls), **weights,
            **options,
        ).history  # fmt: skip
    batches = hvk.loader(data if len(data) > 1 else data[0], BATCH // world.size, shuffle=False, **weights)
    hvk.prepare(model, batches, **prepare)
    if val is not None:
        options["validation_data"] = hvk.loader(val, BATCH // world.size, shuffle=False)
    return model.fit(batches, callbacks=[*hvk.callbacks(model), *calls], **options).history


def evaluate(model: Any, data: tuple[Any, ...]) -> dict[str, float]:
    if RANKED:
        return hvk.evaluate(model, data if len(data) > 1 else data[0], per_rank_batch=BATCH // world.size)
    x, y, sample_weight = (*data, None, None)[:3]
    return model.evaluate(x, y, sample_weight=sample_weight, batch_size=BATCH, verbose=0, return_dict=True)


def predict(model: Any, x: Any) -> Any:
    if RANKED:
        return hvk.predict(model, x, per_rank_batch=BATCH // world.size)
    return model.predict(x, batch_size=BATCH, verbose=0)


def whole(*values: Any) -> Any:
    return hvk.whole(*values) if RANKED else values if len(values) > 1 else values[0]


def all_of(model: Any, history: Any, data: Any = None, inputs: Any = None) -> dict[str, Any]:
    found: dict[str, Any] = {"weights": weights_of(model), "history": history}
    if data is not None:
        found["evaluate"] = evaluate(model, data)
    if inputs is not None:
        found["predict"] = predict(model, inputs)
    return found


def descend(owner: Any, optimizer: Any, weights: Any, loss_of: Callable[[], Any]) -> Any:
    """One update, as the guides of both backends write it; `loss_of` returns the loss and what else is wanted."""
    if BACKEND == "tensorflow":
        with tf.GradientTape() as tape:
            found = loss_of()
        optimizer.apply_gradients(zip(tape.gradient(found[0], weights), weights, strict=True))
        return found
    owner.zero_grad()
    found = loss_of()
    found[0].backward()
    with torch.no_grad():
        optimizer.apply([weight.value.grad for weight in weights], weights)
    return found


# -------------------------------------------------------------------- customizing what happens in fit()
class TrainStep:
    """No `keras.Model` itself: Keras changes the bases of a class that is once made of inputs and outputs."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        if BACKEND == "tensorflow":
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
        else:
            self.zero_grad()
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
            loss.backward()
            trainable_weights = list(self.trainable_weights)
            gradients = [v.value.grad for v in trainable_weights]
            with torch.no_grad():
                self.optimizer.apply(gradients, trainable_weights)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


class CustomModel(TrainStep, keras.Model):
    pass


def small(kind: Any = keras.Model, units: int = 1, **layer: Any) -> Any:
    inputs = keras.Input((5,))
    return kind(inputs, L.Dense(units, **layer)(L.Dense(6, activation="tanh")(inputs)))


@program(25)
def custom_train_step(n: int) -> Any:
    model = small(CustomModel)
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    data = cut((X, VALUE), n)
    return all_of(model, fit(model, data, 3), data, data[0])


class LowerLevel(keras.Model):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    def train_step(self, data: Any) -> Any:
        x, y = data

        def loss_of() -> Any:
            y_pred = self(x, training=True)
            return self.loss_fn(y, y_pred), y_pred

        loss, y_pred = descend(self, self.optimizer, self.trainable_variables, loss_of)
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

    @property
    def metrics(self) -> Any:
        return [self.loss_tracker, self.mae_metric]


@program(29)
def train_step_of_ones_own_trackers(n: int) -> Any:
    model = small(LowerLevel)
    model.compile(optimizer=O.SGD(0.1, momentum=0.9))
    data = cut((X, VALUE), n)
    return all_of(model, fit(model, data), None, data[0])


class Weighted(keras.Model):
    def train_step(self, data: Any) -> Any:
        if len(data) == 3:
            x, y, sample_weight = data
        else:
            sample_weight = None
            x, y = data

        def loss_of() -> Any:
            y_pred = self(x, training=True)
            return self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight), y_pred

        loss, y_pred = descend(self, self.optimizer, self.trainable_variables, loss_of)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
        return {m.name: m.result() for m in self.metrics}


@program(25)
def train_step_with_sample_weight(n: int) -> Any:
    model = small(Weighted)
    model.compile(optimizer=O.Adam(0.02), loss="mse", metrics=["mae"])
    data = cut((X, VALUE, WEIGHT), n)
    return all_of(model, fit(model, data), data, data[0])


@program(29)
def train_step_with_sample_weight_and_none_given(n: int) -> Any:
    model = small(Weighted)
    model.compile(optimizer=O.Adam(0.02), loss="mse", metrics=["mae"])
    data = cut((X, VALUE), n)
    return all_of(model, fit(model, data))


class OwnTest(TrainStep, keras.Model):
    def test_step(self, data: Any) -> Any:
        x, y = data
        y_pred = self(x, training=False)
        loss = self.compute_loss(y=y, y_pred=y_pred)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


@program(25)
def test_step_of_ones_own(n: int) -> Any:
    model = small(OwnTest)
    model.compile(optimizer=O.SGD(0.05), loss="mse", metrics=["mae"])
    data = cut((X, VALUE), n)
    return all_of(model, fit(model, data, val=data), data)


class ComputesLoss(keras.Model):
    """As the docstring of `Model.compute_loss` has it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        loss = ops.mean(ops.square(y_pred - y))
        loss += ops.sum(ops.stack(self.losses))
        self.loss_tracker.update_state(loss)
        return loss

    def reset_metrics(self) -> None:
        self.loss_tracker.reset_state()

    @property
    def metrics(self) -> Any:
        return [self.loss_tracker]


@program(25)
def compute_loss_of_ones_own(n: int) -> Any:
    model = small(ComputesLoss, kernel_regularizer="l2")
    model.compile(optimizer=O.SGD(0.05))
    data = cut((X, VALUE), n)
    return all_of(model, fit(model, data), data, data[0])


class GAN(keras.Model):
    def __init__(self, discriminator: Any, generator: Any) -> None:
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
        self.g_loss_tracker = keras.metrics.Mean(name="g_loss")
        self.built = True

    @property
    def metrics(self) -> Any:
        return [self.d_loss_tracker, self.g_loss_tracker]

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    def train_step(self, real: Any) -> Any:
        if isinstance(real, tuple):
            real = real[0]
        rows = ops.shape(real)[0]
        noise = ops.sin(7 * real[:, :3])  # in the place of a draw: the same for a sample wherever it is
        generated = self.generator(noise)
        combined = ops.concatenate([generated, real], axis=0)
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)

        def d_loss_of() -> Any:
            return (self.loss_fn(labels, self.discriminator(combined)),)

        def g_loss_of() -> Any:
            return (self.loss_fn(ops.zeros((rows, 1)), self.discriminator(self.generator(noise))),)

        (d_loss,) = descend(self.discriminator, self.d_optimizer, self.discriminator.trainable_weights, d_loss_of)
        (g_loss,) = descend(self.generator, self.g_optimizer, self.generator.trainable_weights, g_loss_of)
        self.d_loss_tracker.update_state(d_loss)
        self.g_loss_tracker.update_state(g_loss)
        return {"d_loss": self.d_loss_tracker.result(), "g_loss": self.g_loss_tracker.result()}


@program(25)
def gan(n: int) -> Any:
    discriminator = keras.Sequential([keras.Input((5,)), L.Dense(6), L.LeakyReLU(negative_slope=0.2), L.Dense(1)])
    generator = keras.Sequential([keras.Input((3,)), L.Dense(6, activation="tanh"), L.Dense(5)])
    model = GAN(discriminator, generator)
    model.compile(
        d_optimizer=O.Adam(learning_rate=0.03),
        g_optimizer=O.Adam(learning_rate=0.03),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return all_of(model, fit(model, (X[:n],)))


class WGAN(keras.Model):
    """Of the example of WGAN-GP: several steps of the discriminator, whose penalty is a gradient's norm."""

    def __init__(self, discriminator: Any, generator: Any) -> None:
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.d_steps = 2
        self.gp_weight = 10.0
        self.built = True

    def compile(self, d_optimizer: Any, g_optimizer: Any, d_loss_fn: Any, g_loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.d_loss_fn = d_loss_fn
        self.g_loss_fn = g_loss_fn

    def gradient_penalty(self, real: Any, fake: Any) -> Any:
        alpha = 0.5 + 0.5 * ops.sin(5 * real[:, :1])  # in the place of a draw
        interpolated = real + alpha * (fake - real)
        if BACKEND == "tensorflow":
            with tf.GradientTape() as gp_tape:
                gp_tape.watch(interpolated)
                pred = self.discriminator(interpolated, training=True)
            grads = gp_tape.gradient(pred, [interpolated])[0]
        else:
            pred = self.discriminator(interpolated, training=True)
            grads = torch.autograd.grad(ops.sum(pred), interpolated, create_graph=True)[0]
        norm = ops.sqrt(ops.sum(ops.square(grads), axis=1))
        return ops.mean((norm - 1.0) ** 2)

    def train_step(self, real: Any) -> Any:
        if isinstance(real, tuple):
            real = real[0]
        noise = ops.sin(7 * real[:, :3])

        def d_loss_of() -> Any:
            fake = self.generator(noise, training=True)
            cost = self.d_loss_fn(self.discriminator(real, training=True), self.discriminator(fake, training=True))
            return (cost + self.gradient_penalty(real, fake) * self.gp_weight,)

        def g_loss_of() -> Any:
            return (self.g_loss_fn(self.discriminator(self.generator(noise, training=True), training=True)),)

        for _ in range(self.d_steps):
            (d_loss,) = descend(self, self.d_optimizer, self.discriminator.trainable_variables, d_loss_of)
        (g_loss,) = descend(self, self.g_optimizer, self.generator.trainable_variables, g_loss_of)
        return {"d_loss": d_loss, "g_loss": g_loss}


@program(29)
def wgan_gp(n: int) -> Any:
    """Logs the losses themselves, in Keras those of the last batch."""
    discriminator = keras.Sequential([keras.Input((5,)), L.Dense(6, activation="tanh"), L.Dense(1)])
    generator = keras.Sequential([keras.Input((3,)), L.Dense(6, activation="tanh"), L.Dense(5)])
    model = WGAN(discriminator, generator)
    model.compile(
        d_optimizer=O.Adam(0.01, beta_1=0.5, beta_2=0.9),
        g_optimizer=O.Adam(0.01, beta_1=0.5, beta_2=0.9),
        d_loss_fn=lambda real, fake: ops.mean(fake) - ops.mean(real),
        g_loss_fn=lambda fake: -ops.mean(fake),
    )
    return all_of(model, fit(model, (X[:n],)))


# -------------------------------------------------------------------- making new layers and models
class Sampling(L.Layer):
    """z of mean and variance; noise that follows from the sample, in the place of a draw."""

    def call(self, inputs: Any) -> Any:
        z_mean, z_log_var, x = inputs
        return z_mean + ops.exp(0.5 * z_log_var) * ops.sin(9 * x[:, :2])


class VAE(keras.Model):
    def __init__(self, encoder: Any, decoder: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.encoder = encoder
        self.decoder = decoder
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self) -> Any:
        return [self.total_loss_tracker, self.reconstruction_loss_tracker, self.kl_loss_tracker]

    def train_step(self, data: Any) -> Any:
        if isinstance(data, tuple):  # Keras on PyTorch gives a tuple; on TensorFlow the tensor itself
            data = data[0]

        def loss_of() -> Any:
            z_mean, z_log_var, z = self.encoder(data)
            reconstruction = self.decoder(z)
            reconstruction_loss = ops.mean(ops.sum(keras.losses.binary_crossentropy(data, reconstruction), axis=(1, 2)))
            kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            return reconstruction_loss + kl_loss, reconstruction_loss, kl_loss

        total_loss, reconstruction_loss, kl_loss = descend(self, self.optimizer, self.trainable_weights, loss_of)
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {
            "loss": self.total_loss_tracker.result(),
            "reconstruction_loss": self.reconstruction_loss_tracker.result(),
            "kl_loss": self.kl_loss_tracker.result(),
        }


@program(25)
def vae(n: int) -> Any:
    pictures = keras.Input((4, 4, 1))
    inner = L.Dense(8, activation="relu")(L.Flatten()(L.Conv2D(3, 3, strides=2, padding="same")(pictures)))
    z_mean, z_log_var = L.Dense(2, name="z_mean")(inner), L.Dense(2, name="z_log_var")(inner)
    z = Sampling()([z_mean, z_log_var, L.Flatten()(pictures)])
    encoder = keras.Model(pictures, [z_mean, z_log_var, z], name="encoder")
    latent = keras.Input((2,))
    decoded = L.Conv2DTranspose(3, 3, strides=2, activation="relu", padding="same")(
        L.Reshape((2, 2, 2))(L.Dense(8, activation="relu")(latent))
    )
    decoder = keras.Model(latent, L.Conv2DTranspose(1, 3, activation="sigmoid", padding="same")(decoded))
    model = VAE(encoder, decoder)
    if BACKEND == "torch":
        model.built = True  # plain Keras would build it by a call() that it does not have
    model.compile(optimizer=O.Adam(0.02))
    return all_of(model, fit(model, (PICTURES[:n],)))


class Encoder(L.Layer):
    """The divergence is added in the layer: `add_loss`."""

    def __init__(self) -> None:
        super().__init__()
        self.dense_mean = L.Dense(2)
        self.dense_log_var = L.Dense(2)

    def call(self, inputs: Any) -> Any:
        z_mean, z_log_var = self.dense_mean(inputs), self.dense_log_var(inputs)
        kl_loss = -0.5 * ops.mean(z_log_var - ops.square(z_mean) - ops.exp(z_log_var) + 1)
        self.add_loss(kl_loss)
        return Sampling()([z_mean, z_log_var, inputs])


@program(25)
def vae_by_add_loss(n: int) -> Any:
    inputs = keras.Input((5,))
    model = keras.Model(inputs, L.Dense(5)(L.Dense(6, activation="relu")(Encoder()(inputs))))
    model.compile(optimizer=O.Adam(learning_rate=0.01), loss=keras.losses.MeanSquaredError())
    data = X[:n], X[:n]
    return all_of(model, fit(model, data), data, X[:n])


class LogisticEndpoint(L.Layer):
    """Takes targets, and adds the loss: `compile` is given none."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def call(self, targets: Any, logits: Any) -> Any:
        self.add_loss(self.loss_fn(targets, logits))
        return ops.softmax(logits)


@program(29)
def endpoint_layer(n: int) -> Any:
    inputs, targets = keras.Input((5,), name="inputs"), keras.Input((3,), name="targets")
    model = keras.Model({"inputs": inputs, "targets": targets}, LogisticEndpoint()(targets, L.Dense(3)(inputs)))
    model.compile(optimizer="adam")
    data = {"inputs": X[:n], "targets": np.eye(3)[LABEL[:n]]}
    return all_of(model, fit(model, (data,)), None, data)


# -------------------------------------------------------------------- training with the built-in methods
@program(29)
def accumulated_gradients(n: int) -> Any:
    model = small(units=3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=O.Adam(0.02, gradient_accumulation_steps=2), loss=loss, metrics=["accuracy"])
    data = cut((X, LABEL), n)
    return all_of(model, fit(model, data, 3), data)


@program(25)
def several_inputs_and_outputs(n: int) -> Any:
    """The tickets of the guide to the functional API."""
    title, body = keras.Input((STEPS,), dtype="int32", name="title"), keras.Input((STEPS,), dtype="int32", name="body")
    tags = keras.Input((5,), name="tags")
    features = [L.GlobalAveragePooling1D()(L.Embedding(9, 4)(words)) for words in (title, body)]
    joined = L.concatenate([*features, tags])
    priority, department = L.Dense(1, name="priority")(joined), L.Dense(3, name="department")(joined)
    model = keras.Model([title, body, tags], {"priority": priority, "department": department})
    model.compile(
        optimizer=O.RMSprop(1e-2),
        loss={
            "priority": keras.losses.BinaryCrossentropy(from_logits=True),
            "department": keras.losses.CategoricalCrossentropy(from_logits=True),
        },
        loss_weights={"priority": 1.0, "department": 0.2},
        metrics={"department": ["accuracy"]},
    )
    x = {"title": TOKENS, "body": NEXT, "tags": X}
    data = cut((x, {"priority": (VALUE > 0).astype("float64"), "department": np.eye(3)[LABEL]}), n)
    return all_of(model, fit(model, data), data, data[0])


@program(29)
def class_weight(n: int) -> Any:
    model = keras.Sequential([keras.Input((5,)), L.Dense(6, activation="relu"), L.Dense(3, activation="softmax")])
    model.compile(optimizer=O.RMSprop(1e-2), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    data = cut((X, LABEL), n)
    return all_of(model, fit(model, data, class_weight={0: 1.0, 1: 1.0, 2: 3.0}), data)


class CategoricalTruePositives(keras.metrics.Metric):
    def __init__(self, name: str = "categorical_true_positives", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.true_positives = self.add_variable(shape=(), name="ctp", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        y_pred = ops.reshape(ops.argmax(y_pred, axis=1), (-1, 1))
        values = ops.cast(y_true, "int32") == ops.cast(y_pred, "int32")
        values = ops.cast(values, self.dtype)
        if sample_weight is not None:
            values = ops.multiply(values, ops.cast(sample_weight, self.dtype))
        self.true_positives.assign_add(ops.sum(values))

    def result(self) -> Any:
        return self.true_positives.value

    def reset_state(self) -> None:
        self.true_positives.assign(0)


@program(25)
def metric_of_ones_own(n: int) -> Any:
    model = small(units=3, activation="softmax")
    model.compile(
        optimizer=O.RMSprop(learning_rate=1e-2),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metrics=[CategoricalTruePositives()],
    )
    data = cut((X, LABEL[:, None]), n)
    return all_of(model, fit(model, data), data)


class EarlyStoppingAtMinLoss(K.Callback):
    """The guide's own: stops where the loss is at its minimum, and restores those weights."""

    def __init__(self, patience: int = 0) -> None:
        super().__init__()
        self.patience = patience
        self.best_weights: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.wait = 0
        self.best = np.inf

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        current = logs.get("loss")
        if np.less(current, self.best):
            self.best, self.wait, self.best_weights = current, 0, self.model.get_weights()
        else:
            self.wait += 1
            if self.wait >= self.patience:
                self.model.stop_training = True
                self.model.set_weights(self.best_weights)


class CustomLearningRateScheduler(K.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        rate = float(numpy_of(self.model.optimizer.learning_rate))
        self.model.optimizer.learning_rate = rate * (2.0 if epoch else 1.0)


@program(25)
def callbacks_of_ones_own(n: int) -> Any:
    model = small()
    model.compile(optimizer=O.SGD(0.1), loss="mse")
    data = cut((X, VALUE), n)
    return all_of(model, fit(model, data, 9, calls=[CustomLearningRateScheduler(), EarlyStoppingAtMinLoss()]))


@program(25)
def callbacks_of_keras(n: int) -> Any:
    model = small()
    model.compile(optimizer=O.SGD(0.3, momentum=0.8), loss="mse", metrics=["mae"])
    data = cut((X, VALUE), n)
    with tempfile.TemporaryDirectory() as folder:
        saved, log = Path(folder, "best.keras"), Path(folder, "log.csv")
        calls = [
            K.EarlyStopping(monitor="val_loss", patience=3, restore_best_weights=True),
            K.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1),
            K.ModelCheckpoint(saved, monitor="val_loss", save_best_only=True),
            K.CSVLogger(log),
        ]
        found = all_of(model, fit(model, data, 9, val=cut((X[::-1], VALUE[::-1]), 13), calls=calls))
        if not RANKED or world.is_main:
            found["saved"] = keras.models.load_model(saved).get_weights()
            found["log"] = [[float(v) for v in row.values()] for row in csv.DictReader(log.open())]
    return found


class MyModel(keras.Model):
    """Built by its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.dense1 = L.Dense(6, activation="relu")
        self.dense2 = L.Dense(3)

    def call(self, inputs: Any) -> Any:
        return self.dense2(self.dense1(inputs))


class MyCustomModel(TrainStep, MyModel):
    """The same with a train step."""


@program(25)
def subclassed_model(n: int) -> Any:
    data, found = cut((X, LABEL), n), {}
    for kind in (MyModel, MyCustomModel):
        keras.utils.set_random_seed(3)
        model = kind()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=O.Adam(0.02), loss=loss, metrics=["accuracy"])
        found[kind.__name__] = all_of(model, fit(model, data), data)
    return found


@program(25)
def outputs_without_a_loss(n: int) -> Any:
    """Of the example of a miniature GPT: `loss=[loss_fn, None]`."""
    inputs = keras.Input((STEPS,), dtype="int32")
    x = L.Embedding(9, 4)(inputs)
    model = keras.Model(inputs, [L.Dense(9)(x), x])
    model.compile(optimizer="adam", loss=[keras.losses.SparseCategoricalCrossentropy(from_logits=True), None])
    data = cut((TOKENS, NEXT), n)
    return all_of(model, fit(model, data))


# -------------------------------------------------------------------- transfer learning and distillation
@program(29)
def transfer_learning(n: int) -> Any:
    normal = L.BatchNormalization
    base = keras.Sequential([keras.Input((4, 4, 1)), L.Conv2D(3, 3), normal(), L.ReLU(), L.Conv2D(3, 2), normal()])
    made = np.random.default_rng(2)
    base.set_weights([np.abs(made.normal(size=weight.shape)) for weight in base.get_weights()])  # as if pretrained
    base.trainable = False
    inputs = keras.Input((4, 4, 1))
    x = base(L.Rescaling(scale=2.0, offset=-1)(inputs), training=False)
    model = keras.Model(inputs, L.Dense(1)(L.GlobalAveragePooling2D()(x)))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    data = cut((PICTURES, (VALUE > 0).astype("float64")), n)
    model.compile(optimizer=O.Adam(0.02), loss=loss, metrics=[keras.metrics.BinaryAccuracy()])
    first = fit(model, data)
    base.trainable = True
    model.compile(optimizer=O.Adam(1e-3), loss=loss, metrics=[keras.metrics.BinaryAccuracy()])
    # Keras 3.15 trains these layers on the batch's statistics, in spite of training=False
    return {**all_of(model, fit(model, data, sync_batchnorm=True), data, data[0]), "first": first}


class Distiller(keras.Model):
    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self.teacher = teacher
        self.student = student

    def compile(
        self, optimizer: Any, metrics: Any, student_loss_fn: Any, distillation_loss_fn: Any, alpha: float = 0.1,
        temperature: float = 3,
    ) -> None:  # fmt: skip
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, allow_empty: bool = False
    ) -> Any:
        teacher_pred = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_pred / self.temperature, axis=1), ops.softmax(y_pred / self.temperature, axis=1)
        ) * (self.temperature**2)
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def call(self, x: Any) -> Any:
        return self.student(x)


@program(25)
def distillation(n: int) -> Any:
    teacher, student = small(units=3), keras.Sequential([keras.Input((5,)), L.Dense(3)])
    data = cut((X, LABEL), n)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    teacher.compile(optimizer=O.Adam(0.02), loss=loss, metrics=[keras.metrics.SparseCategoricalAccuracy()])
    taught = fit(teacher, data, 1)
    distiller = Distiller(student=student, teacher=teacher)
    distiller.compile(
        optimizer=O.Adam(0.02),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        student_loss_fn=loss,
        distillation_loss_fn=keras.losses.KLDivergence(),
        alpha=0.1,
        temperature=10,
    )
    return {**all_of(distiller, fit(distiller, data), data), "taught": taught}


# -------------------------------------------------------------------- pairs and triplets
def contrastive(margin: float = 1.0) -> Any:
    def contrastive_loss(y_true: Any, y_pred: Any) -> Any:
        square_pred = ops.square(y_pred)
        margin_square = ops.square(ops.maximum(margin - (y_pred), 0))
        return ops.mean((1 - y_true) * square_pred + (y_true) * margin_square)

    return contrastive_loss


def euclidean_distance(vects: Any) -> Any:
    x, y = vects
    sum_square = ops.sum(ops.square(x - y), axis=1, keepdims=True)
    return ops.sqrt(ops.maximum(sum_square, keras.backend.epsilon()))


@program(29)
def siamese_pairs(n: int) -> Any:
    """Whose tower and whose output have batch normalisation: over all ranks' samples."""
    one, other, given = keras.Input((5,)), keras.Input((5,)), keras.Input((5,))
    tower = keras.Model(given, L.Dense(4, activation="tanh")(L.BatchNormalization()(given)))
    distance = L.Lambda(euclidean_distance, output_shape=(1,))([tower(one), tower(other)])
    output = L.Dense(1, activation="sigmoid")(L.BatchNormalization()(distance))
    model = keras.Model([one, other], output)
    model.compile(loss=contrastive(1), optimizer=O.RMSprop(1e-2), metrics=["accuracy"])
    data = cut(((X, X[::-1].copy()), (VALUE > 0).astype("float64")), n)
    return all_of(model, fit(model, data, sync_batchnorm=True), data, data[0])


class SiameseModel(keras.Model):
    """Of the example: the data has an anchor, a positive and a negative, and no y."""

    def __init__(self, siamese_network: Any, margin: float = 0.5) -> None:
        super().__init__()
        self.siamese_network = siamese_network
        self.margin = margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs: Any) -> Any:
        return self.siamese_network(inputs)

    def train_step(self, data: Any) -> Any:
        (loss,) = descend(
            self, self.optimizer, self.siamese_network.trainable_weights, lambda: (self._compute_loss(data),)
        )
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data: Any) -> Any:
        self.loss_tracker.update_state(self._compute_loss(data))
        return {"loss": self.loss_tracker.result()}

    def _compute_loss(self, data: Any) -> Any:
        ap_distance, an_distance = self.siamese_network(data)
        return ops.mean(ops.maximum(ap_distance - an_distance + self.margin, 0.0))

    @property
    def metrics(self) -> Any:
        return [self.loss_tracker]


class DistanceLayer(L.Layer):
    def call(self, anchor: Any, positive: Any, negative: Any) -> Any:
        return ops.sum(ops.square(anchor - positive), -1), ops.sum(ops.square(anchor - negative), -1)


@program(25)
def siamese_triplets(n: int) -> Any:
    given = keras.Input((5,))
    embedding = keras.Model(given, L.Dense(4)(L.Dense(6, activation="relu")(given)))
    inputs = [keras.Input((5,), name=name) for name in ("anchor", "positive", "negative")]
    network = keras.Model(inputs, DistanceLayer()(*(embedding(each) for each in inputs)))
    model = SiameseModel(network)
    if BACKEND == "torch":
        model.built = True
    # on PyTorch plain Keras would build these metrics by a call of the first part alone
    model.compile(optimizer=O.Adam(0.01), **({} if BACKEND == "torch" else {"weighted_metrics": []}))
    data = cut((X, np.roll(X, 3, 0), np.roll(X, 7, 0)), n)
    return all_of(model, fit(model, data), data)


class Pairs:
    """Of the example of metric learning: each anchor against all positives of the batch."""

    loss_fn: Any = None

    def train_step(self, data: Any) -> Any:
        anchors, positives = data

        def loss_of() -> Any:
            anchor_embeddings, positive_embeddings = whole(self(anchors, training=True), self(positives, training=True))
            similarities = ops.einsum("ae,pe->ap", anchor_embeddings, positive_embeddings)
            similarities /= 0.2
            sparse_labels = ops.arange(ops.shape(similarities)[0])
            if self.loss_fn is not None:
                return (self.loss_fn(sparse_labels, similarities),)
            return (self.compute_loss(y=sparse_labels, y_pred=similarities),)

        (loss,) = descend(self, self.optimizer, self.trainable_variables, loss_of)
        self.metrics[0].update_state(loss)
        return {"loss": self.metrics[0].result()}


class EmbeddingModel(Pairs, keras.Model):
    pass


def embedding_model() -> Any:
    inputs = keras.Input((5,))
    return EmbeddingModel(inputs, L.UnitNormalization()(L.Dense(4)(L.Dense(6, activation="tanh")(inputs))))


@program(29)
def metric_learning(n: int) -> Any:
    model = embedding_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if BACKEND == "torch":  # on which plain Keras would build the loss of compile by the data's second part as y
        model.loss_fn = loss
    model.compile(optimizer=O.Adam(learning_rate=1e-2), loss=None if BACKEND == "torch" else loss)
    return all_of(model, fit(model, cut((X, np.roll(X, 3, 0)), n)))


@program(29)
def metric_learning_with_a_sum(n: int) -> Any:
    model = embedding_model()
    model.loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model.compile(optimizer=O.Adam(learning_rate=1e-2))
    return all_of(model, fit(model, cut((X, np.roll(X, 3, 0)), n)))


class LearnsMetric(Pairs, keras.Model):
    """Built by its first batch, whose second part is no target of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = L.Dense(4)

    def call(self, x: Any) -> Any:
        return ops.normalize(self.embed(x), axis=1)

    def train_step(self, data: Any) -> Any:
        if not self.embed.built:
            self(data[0])
        return super().train_step(data)


@program(25)
def metric_learning_of_an_unbuilt_model(n: int) -> Any:
    model = LearnsMetric()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if BACKEND == "torch":
        model.loss_fn = loss
    model.compile(optimizer=O.Adam(learning_rate=1e-2), loss=None if BACKEND == "torch" else loss)
    return all_of(model, fit(model, cut((X, np.roll(X, 3, 0)), n)))


class ContrastiveModel(keras.Model):
    """Of the example of SimCLR: two optimizers; the loss of the pairs is of all ranks', that of the probe a rank's."""

    def __init__(self, encoder: Any, head: Any, probe: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection_head = head
        self.linear_probe = probe
        self.built = True

    def compile(self, contrastive_optimizer: Any, probe_optimizer: Any, **kwargs: Any) -> None:
        super().compile(**kwargs)
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_loss_tracker = keras.metrics.Mean(name="c_loss")
        self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy(name="c_acc")
        self.probe_loss_tracker = keras.metrics.Mean(name="p_loss")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self) -> Any:
        return [
            self.contrastive_loss_tracker, self.contrastive_accuracy, self.probe_loss_tracker, self.probe_accuracy,
        ]  # fmt: skip

    def contrastive_loss(self, projections_1: Any, projections_2: Any) -> Any:
        projections_1, projections_2 = ops.normalize(projections_1, axis=1), ops.normalize(projections_2, axis=1)
        similarities = ops.matmul(projections_1, ops.transpose(projections_2)) / 0.1
        contrastive_labels = ops.arange(ops.shape(projections_1)[0])
        self.contrastive_accuracy.update_state(contrastive_labels, similarities)
        self.contrastive_accuracy.update_state(contrastive_labels, ops.transpose(similarities))
        crossentropy = keras.losses.sparse_categorical_crossentropy
        loss_1_2 = crossentropy(contrastive_labels, similarities, from_logits=True)
        loss_2_1 = crossentropy(contrastive_labels, ops.transpose(similarities), from_logits=True)
        return (loss_1_2 + loss_2_1) / 2

    def train_step(self, data: Any) -> Any:
        images, labels = data

        def pairs() -> Any:
            views = [self.projection_head(self.encoder(images * scale, training=True)) for scale in (0.8, 1.2)]
            losses = self.contrastive_loss(*whole(*views))
            return (losses if BACKEND == "tensorflow" else ops.sum(losses), losses)

        weights = self.encoder.trainable_weights + self.projection_head.trainable_weights
        losses = descend(self, self.contrastive_optimizer, weights, pairs)[1]
        self.contrastive_loss_tracker.update_state(losses)

        def probed() -> Any:
            logits = self.linear_probe(self.encoder(images, training=False))
            return self.probe_loss(labels, logits), logits

        probe_loss, logits = descend(self, self.probe_optimizer, self.linear_probe.trainable_weights, probed)
        self.probe_loss_tracker.update_state(probe_loss)
        self.probe_accuracy.update_state(labels, logits)
        return {m.name: m.result() for m in self.metrics}


@program(25)
def simclr(n: int) -> Any:
    encoder = keras.Sequential([keras.Input((5,)), L.Dense(6, activation="tanh")])
    head, probe = keras.Sequential([keras.Input((6,)), L.Dense(4)]), keras.Sequential([keras.Input((6,)), L.Dense(3)])
    model = ContrastiveModel(encoder, head, probe)
    model.compile(contrastive_optimizer=O.SGD(0.01), probe_optimizer=O.Adam(0.02))
    return all_of(model, fit(model, cut((X, LABEL), n)))


class OfTheBatch(keras.Model):
    """The guide's loop over metrics, with targets and outputs of the global batch; one metric adds up no means."""

    def train_step(self, data: Any) -> Any:
        x, y = data

        def loss_of() -> Any:
            found = whole(y, self(x, training=True))
            return (self.compute_loss(y=found[0], y_pred=found[1]), *found)

        loss, of_all, y_pred = descend(self, self.optimizer, self.trainable_variables, loss_of)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(of_all, y_pred)
        return {m.name: m.result() for m in self.metrics}


@program(25)
def metrics_of_the_whole_batch(n: int) -> Any:
    model = small(OfTheBatch, units=3, activation="softmax")
    model.compile(optimizer=O.Adam(0.02), loss=dice_of_the_batch, metrics=["accuracy", CategoricalTruePositives()])
    return all_of(model, fit(model, cut((X, LABEL[:, None]), n)))


def dice_of_the_batch(y: Any, p: Any) -> Any:
    """Over the whole batch."""
    truth = ops.one_hot(ops.cast(y[:, 0], "int32"), 3, dtype=p.dtype)
    return 1 - 2 * ops.sum(truth * p) / ops.sum(truth + p * p)


class MaskedLanguageModel(keras.Model):
    """Of the example: a loss without reduction, whose sum over the batch is followed."""

    loss_fn = keras.losses.SparseCategoricalCrossentropy(reduction=None)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def train_step(self, inputs: Any) -> Any:
        features, labels, sample_weight = inputs

        def loss_of() -> Any:
            predictions = self(features, training=True)
            every, all_predictions, weight = whole(labels, predictions, sample_weight)
            losses = self.loss_fn(every, all_predictions, sample_weight=weight)
            return losses if BACKEND == "tensorflow" else ops.sum(losses), losses, weight

        _, losses, weight = descend(self, self.optimizer, self.trainable_variables, loss_of)
        self.loss_tracker.update_state(losses, sample_weight=weight)
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self) -> Any:
        return [self.loss_tracker]


@program(25)
def masked_language_model(n: int) -> Any:
    inputs = keras.Input((STEPS,), dtype="int64")
    model = MaskedLanguageModel(inputs, L.Dense(9, activation="softmax")(L.Embedding(9, 4)(inputs)))
    model.compile(optimizer=O.SGD(0.02))
    masked = np.where(np.arange(STEPS) % 3 == np.arange(ROWS)[:, None] % 3, 1.0, 0.0)
    return all_of(model, fit(model, cut((TOKENS, NEXT, masked), n)))


# -------------------------------------------------------------------- text
@program(25)
def text_classification(n: int) -> Any:
    inputs = keras.Input((STEPS,), dtype="int64")
    x = L.Embedding(9, 4, mask_zero=True)(inputs)
    x = L.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, L.Dense(1, activation="sigmoid", name="predictions")(L.Dense(4, activation="relu")(x)))
    model.compile(loss="binary_crossentropy", optimizer=O.Adam(0.02), metrics=["accuracy"])
    data = cut((TOKENS, (VALUE > 0).astype("float64")), n)
    return all_of(model, fit(model, data), data, data[0])


@program(29)
def tags_of_masked_text(n: int) -> Any:
    """Keras' own mask: the loss divides by what is not masked."""
    model = keras.Sequential([keras.Input((STEPS,), dtype="int32"), L.Embedding(9, 4, mask_zero=True), L.Dense(9)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=O.Adam(0.02), loss=loss, metrics=["sparse_categorical_accuracy"])
    data = cut((TOKENS, NEXT), n)
    return all_of(model, fit(model, data), data)


def masked_loss(label: Any, pred: Any) -> Any:
    mask = label != 0
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    loss = loss_object(label, pred)
    mask = ops.cast(mask, loss.dtype)
    return ops.sum(loss * mask) / ops.sum(mask)


@program(29)
def masked_loss_of_the_batch(n: int) -> Any:
    """A function that divides by the batch's tokens, which `whole=True` is for."""
    model = keras.Sequential([keras.Input((STEPS,), dtype="int32"), L.Embedding(9, 4), L.Dense(9)])
    model.compile(optimizer=O.Adam(0.02), loss=masked_loss)
    data = cut((TOKENS, NEXT), n)
    return all_of(model, fit(model, data, whole=True), data)


class ImageCaptioningModel(keras.Model):
    """Of the example: a loss without reduction, which the train step masks and reduces."""

    cross_entropy: Any = None

    def __init__(self, encoder: Any, decoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.acc_tracker = keras.metrics.Mean(name="accuracy")

    def calculate_loss(self, y_true: Any, y_pred: Any, mask: Any) -> Any:
        loss = (self.cross_entropy or self.loss)(y_true, y_pred)
        mask = ops.cast(mask, dtype=loss.dtype)
        loss *= mask
        return ops.sum(loss) / ops.sum(mask)

    def calculate_accuracy(self, y_true: Any, y_pred: Any, mask: Any) -> Any:
        accuracy = ops.equal(ops.cast(y_true, "int64"), ops.cast(ops.argmax(y_pred, axis=2), "int64"))
        accuracy = ops.cast(ops.logical_and(mask, accuracy), "float64")
        return ops.sum(accuracy) / ops.sum(ops.cast(mask, "float64"))

    def loss_and_acc(self, batch_data: Any, training: bool) -> Any:
        batch_img, batch_seq = batch_data
        encoder_out = self.encoder(batch_img, training=training)
        seq_inp, seq_true = batch_seq[:, :-1], batch_seq[:, 1:]
        pred = self.decoder([seq_inp, encoder_out], training=training)
        seq_true, pred = whole(seq_true, pred)
        mask = ops.not_equal(seq_true, 0)
        return self.calculate_loss(seq_true, pred, mask), self.calculate_accuracy(seq_true, pred, mask)

    def train_step(self, batch_data: Any) -> Any:
        weights = self.encoder.trainable_variables + self.decoder.trainable_variables
        loss, acc = descend(self, self.optimizer, weights, lambda: self.loss_and_acc(batch_data, True))
        self.loss_tracker.update_state(loss)
        self.acc_tracker.update_state(acc)
        return {"loss": self.loss_tracker.result(), "acc": self.acc_tracker.result()}

    def test_step(self, batch_data: Any) -> Any:
        loss, acc = self.loss_and_acc(batch_data, False)
        self.loss_tracker.update_state(loss)
        self.acc_tracker.update_state(acc)
        return {"loss": self.loss_tracker.result(), "acc": self.acc_tracker.result()}

    @property
    def metrics(self) -> Any:
        return [self.loss_tracker, self.acc_tracker]


@program(25)
def image_captioning(n: int) -> Any:
    sequence, picture = keras.Input((STEPS - 1,), dtype="int32"), keras.Input((4,))
    given = L.Add()([L.Embedding(9, 4)(sequence), L.RepeatVector(STEPS - 1)(picture)])
    decoder = keras.Model(
        [sequence, picture], L.Dense(9, activation="softmax")(L.Conv1D(4, 2, padding="causal")(given))
    )
    encoder = keras.Sequential([keras.Input((4, 4, 1)), L.Flatten(), L.Dense(4, activation="relu")])
    model = ImageCaptioningModel(encoder, decoder)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=False, reduction=None)
    if BACKEND == "torch":  # on which plain Keras would build the loss of compile by a call()
        model.built, model.cross_entropy = True, cross_entropy
    model.compile(optimizer=O.Adam(0.02), loss=None if BACKEND == "torch" else cross_entropy)
    words = np.maximum(NEXT, np.where(np.arange(STEPS) < 2, 1, 0))  # two words at least
    data = cut((PICTURES, words), n)
    return all_of(model, fit(model, data, val=data), data)


# -------------------------------------------------------------------- loops of one's own
def batches_of(data: tuple[Any, ...]) -> Any:
    data, size = mine(data)
    return [cut(keras.tree.map_structure(lambda a: a[at:], data), size) for at in range(0, len(data[0]), size)]  # noqa: B023


@program(25)
def train_on_batch(n: int) -> Any:
    model = small()
    model.compile(optimizer=O.Adam(0.02), loss="mse", metrics=["mae"])
    data = cut((X, VALUE), n)
    if RANKED:
        batches: Any = hvk.loader(data, BATCH // world.size, shuffle=False)
        hvk.verify(hvk.prepare(model, batches))
    else:
        batches = batches_of(data)
    for _epoch in range(2):
        for step in range(len(batches)):
            model.train_on_batch(*batches[step])
    return all_of(model, {}, data, data[0])


@program(24)
def loop_from_scratch(n: int) -> Any:
    """Of full batches: every rank has as many samples."""
    model = small(units=3)
    optimizer = O.Adam(learning_rate=1e-2)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    data = cut((X, LABEL), n)
    if RANKED:
        batches: Any = hvk.loader(data, BATCH // world.size, shuffle=False, tail="drop")
        hvk.prepare(optimizer)
    else:
        batches = batches_of(data)

    def train_step(x: Any, y: Any) -> Any:
        return descend(
            model, optimizer, model.trainable_weights, lambda: (loss_fn(y, model(x, training=True)),)
        )[0]  # fmt: skip

    if BACKEND == "tensorflow":
        train_step = tf.function(train_step)
    for _epoch in range(2):
        for step in range(len(batches)):
            train_step(*(ops.convert_to_tensor(part) for part in batches[step]))
    return {"weights": weights_of(model), "predict": model.predict(data[0], verbose=0)}


# -------------------------------------------------------------------- all of them
def flat(found: Any, place: str) -> dict[str, np.ndarray]:
    if isinstance(found, dict):
        return {k: v for name, part in found.items() for k, v in flat(part, f"{place}/{name}").items()}
    if isinstance(found, list) and found and hasattr(found[0], "shape"):
        return {f"{place}/{at:02}": np.asarray(part, "float64") for at, part in enumerate(found)}
    return {place: np.asarray(found, "float64")}


def main(out: str, wanted: list[str]) -> None:
    global alone
    arrays: dict[str, np.ndarray] = {}
    for name in wanted or list(PROGRAMS):
        function, rows = PROGRAMS[name]
        for alone in [False] if RANKED else [False, True]:
            keras.backend.clear_session()
            keras.utils.set_random_seed(3)
            if BACKEND == "tensorflow" and not RANKED:  # tracing takes longer than these programs train
                tf.config.run_functions_eagerly(name not in TRACED)
            try:
                arrays.update(flat(function(rows), f"alone/{name}" if alone else name))
            except Exception:
                print(f"program {name} failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                os._exit(3)
    if not RANKED or world.is_main:
        np.savez(out, **arrays)
    if RANKED:
        world.barrier()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
