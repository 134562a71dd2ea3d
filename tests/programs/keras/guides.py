"""Programs as Keras' own guides write them, each in plain Keras and with hvdtrain's documented changes, in float64.

usage: guides.py OUT.npz [program ...]     one process: plain Keras, nothing of hvdtrain; N ranks: an N-th of each batch

OUT.npz holds weights, history, evaluation and predictions of each program.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from common import BACKEND, L, block, in_float64, weights_of
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

in_float64()
BATCH = 12
K, O = keras.callbacks, keras.optimizers  # noqa: E741
RNG = np.random.default_rng(11)
ROWS = 29
X = RNG.normal(size=(ROWS, 5))
VALUE = X[:, :1] * X[:, 1:2] + RNG.normal(size=(ROWS, 1))
LABEL = RNG.integers(0, 3, ROWS)
WEIGHT = np.linspace(0.1, 3.0, ROWS)
PICTURES = RNG.uniform(size=(ROWS, 4, 4, 1))
# in these plain Keras cannot run a metric of one's own where it is eager
TRACED = ("metrics_of_the_whole_batch",)
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


def fit(model: Any, data: tuple[Any, ...], epochs: int = 2, *, val: Any = None, **prepare: Any) -> Any:
    """Trains on (x, y), (x, y, sample_weight) or (x,); returns the history."""
    options: dict[str, Any] = {"epochs": epochs, "verbose": 0}
    if not RANKED:
        if val is not None:
            options.update(validation_data=val, validation_batch_size=BATCH)
        x, y, sample_weight = (*data, None, None)[:3]
        return model.fit(
            x, y, sample_weight=sample_weight, batch_size=BATCH, shuffle=False, **options,
        ).history  # fmt: skip
    batches = hvk.loader(data if len(data) > 1 else data[0], BATCH // world.size, shuffle=False)
    hvk.prepare(model, batches, **prepare)
    if val is not None:
        options["validation_data"] = hvk.loader(val, BATCH // world.size, shuffle=False)
    return model.fit(batches, callbacks=hvk.callbacks(model), **options).history


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


def small(kind: Any = keras.Model, units: int = 1, **layer: Any) -> Any:
    inputs = keras.Input((5,))
    return kind(inputs, L.Dense(units, **layer)(L.Dense(6, activation="tanh")(inputs)))


class Custom(keras.Model):
    def train_step(self, data: Any) -> Any:
        x, y, sample_weight = data

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
def custom_train_step(n: int) -> Any:
    model = small(Custom)
    model.compile(optimizer=O.Adam(0.02), loss="mse", metrics=["mae"])
    data = cut((X, VALUE, WEIGHT), n)
    return all_of(model, fit(model, data), data, data[0])


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


# -------------------------------------------------------------------- pairs


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


# -------------------------------------------------------------------- loops of one's own
def batches_of(data: tuple[Any, ...]) -> Any:
    return [cut(keras.tree.map_structure(lambda a: a[at:], data), BATCH) for at in range(0, len(data[0]), BATCH)]  # noqa: B023


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
    arrays: dict[str, np.ndarray] = {}
    for name in wanted or list(PROGRAMS):
        function, rows = PROGRAMS[name]
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        if BACKEND == "tensorflow" and not RANKED:  # tracing takes longer than these programs train
            tf.config.run_functions_eagerly(name not in TRACED)
        try:
            arrays.update(flat(function(rows), name))
        except Exception:
            print(f"program {name} failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            os._exit(3)
    if not RANKED or world.is_main:
        np.savez(out, **arrays)
    if RANKED:
        world.barrier()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
