"""Training loops and data that would go wrong over ranks: refused by all, or right; one after the other in the same
ranks.

usage: loop.py FOLDER        writes FOLDER/loop.rankR.json: case -> "passed ..." or the error's text
"""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np
from common import BACKEND, L, images, loss, numpy_of
from jobs import RANK, SIZE, O, case, cases, compiled, data, fit, fitted, hvk, run_cases, shared_folder, world

import hvdtrain
from hvdtrain import LR

K = keras.callbacks
X, Y = images(64)
X = X.astype("float32")


def mine(each: int = 16) -> slice:
    return slice(RANK * each, RANK * each + each)


def equal(model: keras.Model) -> str:
    assert len(set(world.gather(hvk.fingerprint(model)))) == 1, "replicas differ"
    return "equal"


# -------------------------------------------------------------------- the same data
def multi() -> Any:
    return O.MultiOptimizer(O.OptimizerMap(O.SGD(0.05), {".*kernel": O.Adam(1e-2)}))


def with_lr() -> keras.Model:
    return hvk.prepare(compiled(), lr=LR(0.1, 8), per_rank_batch=8)


ORDER = np.random.default_rng(RANK).permutation(64)
cases(
    strided_data=lambda: hvk.loader((X[RANK::SIZE], Y[RANK::SIZE]), 8),
    other_order=lambda: hvk.loader((X[ORDER], Y[ORDER]), 8),
    other_length=lambda: hvk.loader((X[: 60 + 4 * RANK], Y[: 60 + 4 * RANK]), 8),
    other_seed=lambda: hvk.loader((X, Y), 8, seed=RANK),
    strided_evaluation=lambda: hvk.evaluate(hvk.prepare(compiled()), (X[RANK::SIZE], Y[RANK::SIZE]), per_rank_batch=8),
    plain_fit_of_all_data=lambda: fitted(hvk.prepare(compiled()), X, Y),
    data_set_of_all_data=lambda: fitted(hvk.prepare(compiled(traced=True)), source(slice(None))),
    data_set_of_own_shard=lambda: equal(fitted(hvk.prepare(compiled(traced=True)), source(slice(RANK, None, SIZE)))),
    labels_in_a_list=lambda: hvk.loader((X, Y.tolist()), 8),
    optimizer_in_a_dict=lambda: parts("dict"),
    optimizer_of_a_submodel=lambda: parts("submodel"),
    optimizer_out_of_sight=lambda: parts("hidden"),
    variables_assigned_by_hand=lambda: parts("by hand"),
    optimizer_without_callbacks=lambda: fit(compiled(hvk.prepare(O.SGD(0.1)), seed=RANK, traced=True)),
    other_batch_than_prepared=lambda: fitted(with_lr(), hvk.loader((X, Y), 16)),
    progress_without_initial_epoch=lambda: restored(hvdtrain.Progress(2, 8, 128, 0)),
    mid_epoch_restored=lambda: restored(hvdtrain.Progress(2, 9, 144, 16), initial_epoch=2),
    a_callback_that_sets_the_rate=lambda: fitted(with_lr(), data(), more=[K.ReduceLROnPlateau()]),
    several_rates=lambda: hvk.prepare(compiled(multi()), lr=LR(0.05, 8), per_rank_batch=8),
    stop_on_one_rank=lambda: stopped([Stop(2, rank=1)]),
    stop_on_one_rank_only_there=lambda: stopped([Stop(2)] if RANK == 1 else []),
    early_stopping_before_ours=lambda: stopped(
        [K.EarlyStopping("loss", patience=0, min_delta=1e9, restore_best_weights=True)]
    ),
    unequal_first_epochs=lambda: fitted(hvk.prepare(compiled()), data(), epochs=3, initial_epoch=RANK),
    unknown_length=lambda: fitted(hvk.prepare(compiled()), rows(4 + RANK)),
    data_that_ends_early=lambda: fitted(hvk.prepare(compiled()), rows(3), steps_per_epoch=5),
    keras_noise=lambda: noise_of("keras"),
    model_of_keras_2=lambda: hvk.prepare(
        type("Sequential", (), {"__module__": "tf_keras.src.engine.sequential", "optimizer": None})()
    ),
)


def rows(batches: int) -> Any:
    for number in range(batches):
        yield X[mine(8)] + number, Y[mine(8)]


def source(rows: Any) -> Any:
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices((X[rows], Y[rows])).batch(8)
    import torch

    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*map(torch.from_numpy, (X[rows], Y[rows]))), 8)


# -------------------------------------------------------------------- kinds of data
@case
def text_as_data() -> str:
    words = np.array(["a", "longer", "text"] * 8)
    data: list[Any] = [words, words.astype("S6"), words.astype(object), {"text": words}]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        data.append(tf.constant(words.tolist()))
    messages = []
    for x in data:
        try:
            hvk.loader((x, Y[:24]), 8)
            return f"dealt {type(x).__name__}"
        except hvdtrain.ConfigError as error:
            messages.append(str(error))
    assert all("must hold numbers" in message for message in messages), messages
    hvk.loader((words, Y[:24]), 8)
    return "dealt"


@case
def tensors_and_no_targets() -> str:
    x = keras.ops.convert_to_tensor(X[:17])  # a tail of one: rank 1 gets a dummy of weight 0
    x2 = keras.ops.convert_to_tensor(X[:17])

    class Auto(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.Sequential([L.Input((6, 6, 1)), L.Flatten(), L.Dense(36)])

        def call(self, x: Any) -> Any:
            return self.inner(x)

        def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
                         training: bool = True) -> Any:  # fmt: skip
            values = keras.ops.mean((keras.ops.reshape(x, (-1, 36)) - y_pred) ** 2, axis=-1)
            values = values if sample_weight is None else values * keras.ops.cast(sample_weight, values.dtype)
            return keras.ops.mean(values)

    def train(prepared: bool) -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        model = Auto()
        model.compile(O.SGD(0.1))
        model.build((None, 6, 6, 1))
        if prepared:
            fitted(hvk.prepare(model), hvk.loader(x, 8, shuffle=False))
        else:
            model.fit(x2, batch_size=16, shuffle=False, verbose=0)
        return [numpy_of(v) for v in model.weights]

    gap = max(float(np.abs(a - b).max()) for a, b in zip(train(True), train(False), strict=True))
    assert gap < 1e-6, gap
    return f"{gap:.2g}"


# -------------------------------------------------------------------- optimizers
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


class Parts(keras.Model):
    """A GAN's shape: optimizers in a dict, in a list or with a sub-model; or none at all."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.first = keras.Sequential([L.Input((6,)), L.Dense(4)])
        self.second = keras.Sequential([L.Input((6,)), L.Dense(4)])
        self.built = BACKEND == "torch"
        self.kept = kept
        if kept == "dict":
            self.opts = {"inner": [O.Adam(0.1)]}
        elif kept == "submodel":
            self.second.compile(O.Adam(0.1))
        elif kept == "hidden":
            hidden = O.Adam(0.1)
            self.find = lambda: hidden

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        step(self.first, self.optimizer, x, y)
        if self.kept == "by hand":
            for variable in self.second.trainable_variables:
                variable.assign_add(keras.ops.zeros_like(variable) + keras.ops.cast(keras.ops.mean(x), "float32"))
        else:
            found = {"dict": lambda: self.opts["inner"][0], "submodel": lambda: self.second.optimizer}
            step(self.second, found.get(self.kept, getattr(self, "find", None))(), x, y)
        return {"steps": 1.0}


def parts(kept: str) -> str:
    keras.utils.set_random_seed(20)
    model = Parts(kept)
    model.compile(O.SGD(0.1))
    model.optimizer.build(model.first.trainable_variables)
    if kept in ("dict", "submodel"):
        (model.opts["inner"][0] if kept == "dict" else model.second.optimizer).build(model.second.trainable_variables)
    hvk.prepare(model, verify=False)
    rng = np.random.default_rng(RANK)
    x, y = rng.normal(size=(16, 6)).astype("float32"), rng.normal(size=(16, 4)).astype("float32")
    return equal(fitted(model, x, y, batch_size=8))


@case
def batches_of_four() -> str:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.Sequential([L.Input((6,)), L.Dense(4)])
            self.built = True

        def call(self, x: Any) -> Any:
            return self.inner(x)

        def train_step(self, data: Any) -> dict[str, Any]:
            a, b, y, _ = data
            step(self.inner, self.optimizer, a + b, y)
            return {"steps": 1.0}

    rng = np.random.default_rng(RANK)
    rows = [tuple(rng.normal(size=(8, n)).astype("float32") for n in (6, 6, 4, 1)) for _ in range(3)]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        rows = tf.data.Dataset.from_tensor_slices(tuple(map(np.stack, zip(*rows, strict=True)))).repeat()
    else:
        import torch

        rows = torch.utils.data.DataLoader([tuple(map(torch.from_numpy, row)) for row in rows], batch_size=None)
    model = Own()
    model.compile(O.SGD(0.1))
    model.optimizer.build(model.inner.trainable_variables)
    return equal(fitted(hvk.prepare(model, verify=False), rows, steps_per_epoch=3))


# -------------------------------------------------------------------- clock
@case
def a_fit_for_each_epoch() -> str:
    """The rates of three fits of one epoch are those of one fit of three."""

    def rates(fits: list[tuple[int, int]]) -> list[float]:
        seen: list[float] = []
        lr = LR(0.1, 8, warmup_samples=32, schedule="cosine", total_samples=100)
        model = hvk.prepare(compiled(), lr=lr, per_rank_batch=8)
        look = K.LambdaCallback(
            on_train_batch_end=lambda *_, **__: seen.append(float(numpy_of(model.optimizer.learning_rate)))
        )
        for first, epochs in fits:
            fitted(model, data(), initial_epoch=first, epochs=epochs, more=[look])
        return seen

    once, thrice = rates([(0, 3)]), rates([(0, 1), (1, 2), (2, 3)])
    assert len(once) == 6 and once == thrice and len(set(once)) == 6, (once, thrice)
    return f"{len(once)} rates"


def restored(progress: Any, **arguments: Any) -> str:
    """Continues from a checkpoint of mid-epoch, with data that does not keep its place."""
    batches = hvk.loader((X, Y), 8)
    model = hvk.prepare(compiled(), batches, lr=LR(0.1, 8))
    with shared_folder() as folder:
        checkpoints = hvdtrain.Checkpointer(folder, best=None)
        checkpoints.save(hvk.model_state(model), progress=progress)
        assert checkpoints.restore(hvk.model_state(model)) == progress
    fitted(model, batches, epochs=3, **arguments)
    return f"trained, {vars(model)['_hvdtrain'].place.progress}"


@case
def mid_epoch_without_its_counts() -> str:
    batches = hvk.loader((X, Y), 8)
    model = hvk.prepare(compiled(), batches, lr=LR(0.1, 8))
    batches.go_on(2, 16)
    fitted(model, batches, epochs=3, initial_epoch=2)
    return "trained"


@case
def a_callback_of_the_users_sets_the_rate() -> str:
    model = with_lr()

    def halve(*_: Any, **__: Any) -> None:
        model.optimizer.learning_rate = 0.01

    fitted(model, data(), epochs=2, more=[K.LambdaCallback(on_epoch_end=halve)])
    return "trained"


@case
def several_rates_recorded() -> str:
    model = hvk.prepare(compiled(multi()))
    with shared_folder() as folder, hvdtrain.RunLog(folder, world, config={}, progress=False, tensorboard=False) as run:
        fit(model, hvk.callbacks(model, run=run))
    return "trained"


# -------------------------------------------------------------------- stop together
class Stop(K.Callback):
    """Stops after a batch, on one rank or on all."""

    def __init__(self, at: int, rank: int | None = None) -> None:
        super().__init__()
        self.at, self.rank, self.steps = at, rank, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        if self.steps == self.at and self.rank in (None, RANK):
            self.model.stop_training = True


def updated(model: keras.Model) -> str:
    return f"{int(numpy_of(model.optimizer.iterations))} updates"


def stopped(callbacks: list[Any]) -> str:
    model = hvk.prepare(compiled())
    callbacks = [*callbacks, *hvk.callbacks(model)]
    model.fit(data(samples=64), epochs=3, verbose=0, validation_data=(X[:8], Y[:8]), callbacks=callbacks)
    return f"{updated(model)}, {equal(model)}"


@case
def traced_once() -> str:
    """Metrics get their variables in the first step, for which TensorFlow would trace it a second time."""
    traces = [] if BACKEND == "tensorflow" else ["once"]

    def squared(y: Any, predicted: Any) -> Any:
        if keras.ops.is_tensor(predicted) and not hasattr(predicted, "numpy"):  # what a graph holds has no numbers
            traces.append("once")
        return keras.ops.mean(keras.ops.square(predicted), -1) + 0.0 * keras.ops.cast(y, predicted.dtype)

    model = hvk.prepare(compiled(traced=True, loss=squared, metrics=["accuracy"]))
    fit(model, hvk.callbacks(model))
    return f"traced {' and '.join(traces)}, {equal(model)}"


@case
def stop_at_an_epochs_end_of_one_rank() -> str:
    shared: list[bool] = []

    def stop(epoch: int, logs: Any) -> None:
        shared.append(vars(model)["_hvdtrain"].fit.stops_in_epoch)
        if RANK == 1:
            model.stop_training = True

    model = hvk.prepare(compiled())
    fitted(model, data(), epochs=3, more=[K.LambdaCallback(on_epoch_end=stop)])
    hvk.evaluate(model, (X, Y), per_rank_batch=8)
    assert shared == [False], "no callback has a hook within an epoch: ranks ask each other at its end"
    return f"{updated(model)}, {equal(model)}"


@case
def nan_on_one_rank() -> str:
    x = X.copy()
    x[5 + 16 * (SIZE - 1)] = np.nan
    options = {"batch_size": 8, "epochs": 3, "shuffle": False, "more": [K.TerminateOnNaN()]}
    return updated(fitted(hvk.prepare(compiled(traced=True)), x[mine()], Y[mine()], **options))


# -------------------------------------------------------------------- random state
class Noisy(keras.Model):
    """Its train step draws without a seed: from Keras' global generator, and where it can from numpy and Python."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = keras.Sequential([L.Input((6, 6, 1)), L.Flatten(), L.Dense(4)])
        self.drawn = self.add_weight(shape=(), name="drawn", trainable=False)
        self.kind = kind

    def get_config(self) -> dict[str, Any]:
        return {"kind": self.kind}

    def call(self, x: Any) -> Any:
        return self.inner(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        if self.kind == "keras":
            noise = keras.random.normal(())
        elif self.kind == "tf":
            import tensorflow as tf

            noise = tf.random.normal(())
        else:
            noise = keras.ops.convert_to_tensor(np.float32(np.random.normal() + random.random()))
        self.drawn.assign(noise)
        return super().train_step(data)


def noisy(kind: str, *, eagerly: bool = False) -> keras.Model:
    keras.utils.set_random_seed(9)
    model = Noisy(kind)
    model.build((None, 6, 6, 1))
    model.compile(O.SGD(0.1), loss(), run_eagerly=eagerly)
    return hvk.prepare(model, verify=False)


def noise_of(kind: str, *, eagerly: bool = False) -> str:
    """Each rank's noise differs, and goes on exactly from a checkpoint."""

    def train(folder: str, epochs: int, *, resume: bool = False) -> list[float]:
        model = noisy(kind, eagerly=eagerly)
        saver = hvdtrain.Checkpointer(folder, best=None)
        progress = saver.restore(hvk.model_state(model)) if resume else None
        seen: list[float] = []
        end = K.LambdaCallback(on_train_batch_end=lambda *_, **__: seen.append(float(numpy_of(model.drawn))))
        batches = data()
        model.fit(batches, epochs=epochs, initial_epoch=progress.epoch if progress else 0, verbose=0,
                  callbacks=[*hvk.callbacks(model, checkpointer=saver), end])  # fmt: skip
        return seen

    with shared_folder() as folder:
        whole = train(f"{folder}/whole", 2)
        keras.backend.clear_session()
        train(f"{folder}/cut", 1)
        keras.backend.clear_session()
        rest = train(f"{folder}/cut", 2, resume=True)
    assert whole[len(whole) // 2 :] == rest, (whole, rest)
    ranks = world.gather(whole)
    assert not set(ranks[0]) & set(ranks[1]) and len(set(whole)) == len(whole), ranks
    return f"{len(whole)} draws"


@case
def numpy_and_python_noise() -> str:
    found = noise_of("numpy", eagerly=True)
    after = world.gather((random.random(), np.random.random()))
    assert len(set(after)) == 1, "the generators outside of the step differ over ranks"
    return found


@case
def tensorflow_noise() -> str:
    """On TensorFlow only; refused in a run with checkpoints."""
    model = noisy("tf")
    seen: list[float] = []  # after each step: at an epoch's end statistics are averaged
    look = K.LambdaCallback(on_train_batch_end=lambda *_, **__: seen.append(float(numpy_of(model.drawn))))
    fit(model, [*hvk.callbacks(model), look])
    drawn = world.gather(seen)
    assert not set(drawn[0]) & set(drawn[1]), drawn
    model = noisy("tf")
    with shared_folder() as folder:
        try:
            fit(model, hvk.callbacks(model, checkpointer=hvdtrain.Checkpointer(folder, best=None)))
        except hvdtrain.ConfigError as error:
            return f"differs, refused ConfigError: {error}"
    raise AssertionError("not refused")


if __name__ == "__main__":
    run_cases("loop")
