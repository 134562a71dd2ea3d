"""Whole fits on two ranks, with validation, callbacks and metrics, beside plain Keras in the same process.

usage: fits.py FOLDER        writes FOLDER/fits.rankR.json: case -> "passed ..." or the error's text

A model that was not prepared trains as plain Keras, on all samples: the reference, in float64.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any
from unittest import mock

import keras
import numpy as np
from common import BACKEND, L, apart, in_float64, numpy_of, weights_of
from common import loss as crossentropy
from jobs import RANK, SIZE, O, case, cases, hvk, run_cases, shared_folder, world

import hvdtrain
from hvdtrain.keras.backends.session import is_built
from hvdtrain.keras.state import replicas
from hvdtrain.record.bottleneck import RunFacts

in_float64()
K = keras.callbacks
RNG = np.random.default_rng(6)
X, Y = RNG.normal(size=(60, 5)), RNG.integers(0, 3, 60)
STEPS = 4
TOKENS, TAGS = RNG.integers(1, 9, (60, STEPS)), RNG.integers(0, 3, (60, STEPS))
TAGS[np.arange(STEPS) > np.arange(60)[:, None] % STEPS] = -1
BATCH = 6 * SIZE
EXACT = 1e-10


def sparse(**options: Any) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def net(optimizer: Any = None, seed: int = 1, layers: Any = (), traced: bool = False, **compile: Any) -> keras.Model:
    """On TensorFlow tracing takes longer than these steps: few cases need it."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([L.Input((5,)), L.Dense(4, activation="tanh"), *layers, L.Dense(3)])
    options = {"jit_compile": False, "run_eagerly": not traced, **compile}
    model.compile(optimizer or O.SGD(0.3), options.pop("loss", None) or crossentropy(), **options)
    return model


def tagger() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([L.Input((STEPS,), dtype="int32"), L.Embedding(9, 4), L.Dense(3)])
    model.compile(O.SGD(0.3), sparse(ignore_class=-1), run_eagerly=True)
    return model


def near(*gaps: float) -> str:
    assert max(gaps) < EXACT, gaps
    return f"{max(gaps):.1e}"


def same_history(mine: Any, plain: Any) -> float:
    assert set(mine.history) == set(plain.history), (mine.history, plain.history)
    return max(apart(mine.history[name], values) for name, values in plain.history.items())


def between(model: keras.Model, other: keras.Model) -> float:
    return apart(weights_of(model), weights_of(other))


def deal(x: Any, y: Any, *weights: Any, **options: Any) -> Any:
    return hvk.loader((x, y, *weights), BATCH // SIZE, shuffle=False, **options)


def ours(model: keras.Model, data: Any, epochs: int = 1, callbacks: Any = (), **options: Any) -> Any:
    callbacks = [*hvk.callbacks(model), *callbacks]
    return model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks, **options)


def plainly(model: keras.Model, x: Any, y: Any = None, epochs: int = 1, **options: Any) -> Any:
    # tracing takes longer than these steps; where it is eager, Keras logs other losses of several outputs
    model.run_eagerly = BACKEND == "tensorflow" and not isinstance(y, dict)
    return model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=epochs, verbose=0, **options)


def evaluated(model: keras.Model, x: Any, y: Any) -> float:
    """How far from Keras' own evaluation that of the ranks is."""
    here = hvk.evaluate(model, (x, y), per_rank_batch=BATCH // SIZE)
    there = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    assert set(here) == set(there), (here, there)
    return apart(here.values(), [there[name] for name in here])


def noted(model: keras.Model, x: Any, y: Any) -> str:
    """What a fit prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        ours(hvk.prepare(model), deal(x, y))
    return printed.getvalue()


def alike(make: Any, x: Any, y: Any, *weights: Any, epochs: int = 2, fit: Any = None, **prepare: Any) -> str:
    """Fits on all ranks and in plain Keras: what is logged, and the weights."""
    model, plain, fit = make(), make(), fit or {}
    data = deal(x, y, *weights)
    here = ours(hvk.prepare(model, data, **prepare), data, epochs, **fit)
    there = plainly(plain, x, y, epochs, sample_weight=weights[0] if weights else None, **fit)
    logged = {} if weights else {"history": same_history(here, there)}  # of which Keras weighs some
    return near(between(model, plain), *logged.values())


def both(make: Any, x: Any, y: Any, val: Any, epochs: int = 2, callbacks: Any = lambda: []) -> str:
    """Fits with validation on all ranks and in plain Keras: the logs, and what callbacks make of them."""
    model, plain = hvk.prepare(make()), make()
    here = ours(model, deal(x, y), epochs, callbacks(), validation_data=deal(*val))
    there = plainly(plain, x, y, epochs, validation_data=val, validation_batch_size=BATCH, callbacks=callbacks())
    return near(same_history(here, there), between(model, plain))


@case
def validates_with_a_tail() -> str:
    """One sample more than full batches: a rank has none in the last step."""
    return both(lambda: net(metrics=["accuracy"], traced=True), X[:44], Y[:44], (X[44:57], Y[44:57]))


@case
def validates_fewer_samples_than_ranks() -> str:
    return both(lambda: net(metrics=["accuracy"]), X[:44], Y[:44], (X[44:45], Y[44:45]))


@case
def validates_masked_labels() -> str:
    return both(tagger, TOKENS[:36], TAGS[:36], (TOKENS[36:], TAGS[36:]))


@case
def stops_early_as_plain_keras() -> str:
    """EarlyStopping and ReduceLROnPlateau see the validation of all samples."""

    def watching() -> list[Any]:
        plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.05)
        return [plateau, keras.callbacks.EarlyStopping("val_loss", patience=2, min_delta=0.02)]

    return both(lambda: net(O.SGD(1.0)), X[:36], Y[:36], (X[36:49], Y[36:49]), epochs=8, callbacks=watching)


@case
def evaluates_as_plain_keras() -> str:
    models = (net(metrics=["accuracy"]), X, Y), (tagger(), TOKENS, TAGS)
    return near(*(evaluated(hvk.prepare(model), x[:n], y[:n]) for model, x, y in models for n in (1, 13, 40)))


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: O.AdamW(1e-2, weight_decay=0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "scaled": lambda: O.LossScaleOptimizer(O.Nadam(1e-2), initial_scale=4.0, dynamic_growth_steps=3),
}


@case
def every_optimizer() -> str:
    """With the options that each takes, and a tail; the second epoch is another model's, from a checkpoint."""
    gaps, x, y = {}, X[: 8 * BATCH // 3], Y[: 8 * BATCH // 3]
    for name, make in OPTIMIZERS.items():
        model, new, plain = (net(make(), loss=crossentropy()) for _ in range(3))
        ours(hvk.prepare(model), deal(x, y))
        hvk.prepare(new)
        with shared_folder() as folder:
            checkpoints = hvdtrain.Checkpointer(folder, best=None)
            checkpoints.save(hvk.model_state(model), progress=hvdtrain.Progress(1, 3, len(x), 0))
            checkpoints.restore(hvk.model_state(new))
        ours(new, deal(x, y), 2, initial_epoch=1)
        for epoch in (0, 1):  # averages are written over the weights at the end of a fit
            plainly(plain, x, y, epoch + 1, initial_epoch=epoch)
        kept = [[numpy_of(variable) for variable in one.optimizer.variables] for one in (new, plain)]
        gaps[name] = max(apart(*kept), between(new, plain))
    assert max(gaps.values()) < 1e-10, gaps
    return f"{max(gaps.values()):.1e}"


class Errors(keras.metrics.Metric):
    """Gives two numbers by name."""

    def __init__(self) -> None:
        super().__init__(name="errors")
        self.sum, self.seen = (self.add_weight(shape=(), initializer="zeros", name=name) for name in ("sum", "seen"))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.sum.assign_add(keras.ops.sum(keras.ops.abs(y_pred)))
        self.seen.assign_add(keras.ops.sum(keras.ops.ones_like(y_true, dtype=self.dtype)))

    def result(self) -> Any:
        return {"size": self.sum / self.seen, "seen": 1.0 * self.seen}


@case
def metrics_that_give_several_numbers() -> str:
    """In the logs of fit and in evaluate, with a tail of which a rank has nothing."""
    near(evaluated(hvk.prepare(net(metrics=[Errors()])), X[:13], Y[:13]))
    return both(lambda: net(metrics=[Errors()]), X[:44], Y[:44], (X[44:57], Y[44:57]))


class Adversaries(keras.Model):
    """Whose call() takes noise, and whose train_step takes samples."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(1)
        self.maker = keras.Sequential([L.Input((3,)), L.Dense(5)])
        self.judge = keras.Sequential([L.Input((5,)), L.Dense(1)])
        self.mean = keras.metrics.Mean("under another name", dtype="float64")

    @property
    def metrics(self) -> list[Any]:
        return [self.mean]

    def call(self, noise: Any) -> Any:
        return self.maker(noise)

    def train_step(self, data: Any) -> Any:
        x = data  # as fit(x) gives it
        with contextlib.ExitStack() as stack:
            if BACKEND == "tensorflow":
                import tensorflow as tf

                tape = stack.enter_context(tf.GradientTape())
            loss = keras.ops.mean((self.judge(self.maker(x[:, :3])) - self.judge(x)) ** 2)
        if BACKEND == "tensorflow":
            gradients = tape.gradient(loss, self.trainable_weights)
        else:
            self.zero_grad()
            loss.backward()
            gradients = [weight.value.grad for weight in self.trainable_weights]
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.mean.update_state(loss, sample_weight=keras.ops.shape(x)[0])
        return {"loss": self.mean.result()}


@case
def parts_that_a_step_of_ones_own_calls() -> str:
    model, plain = Adversaries(), Adversaries()
    for its in (model, plain):
        its.compile(O.SGD(0.05), jit_compile=False)
        if BACKEND == "torch":  # on which plain Keras builds every model by its call()
            its(X[:1, :3])
    assert is_built(model), "its parts have their variables: a checkpoint can be loaded into it"
    data = hvk.loader(X[:45], BATCH // SIZE, shuffle=False)
    here = ours(hvk.prepare(model, data), data, 2)
    return near(same_history(here, plainly(plain, X[:45], epochs=2)), between(model, plain))


class Unpacking(keras.Model):
    """The steps of Keras' guide: a batch is x and y, and nothing else."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        return super().train_step((x, y))

    def test_step(self, data: Any) -> Any:
        x, y = data
        return super().test_step((x, y))


@case
def a_step_that_unpacks_x_and_y() -> str:
    """With a last step in which a rank has no sample."""

    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        x = L.Input((5,))
        model = Unpacking(x, L.Dense(3)(L.Dense(4, activation="tanh")(x)))
        model.compile(O.SGD(0.3), crossentropy(), metrics=["accuracy"], jit_compile=False)
        return model

    return both(make, X[:37], Y[:37], (X[37:50], Y[37:50]))


@case
def keras_own_evaluate_and_predict_of_a_loader() -> str:
    model, plain = hvk.prepare(net(metrics=["accuracy"])), net(metrics=["accuracy"])
    here = model.evaluate(deal(X[:37], Y[:37]), verbose=0, return_dict=True)
    there = plain.evaluate(X[:37], Y[:37], batch_size=BATCH, verbose=0, return_dict=True)
    found, wanted = model.predict(deal(X[:37], Y[:37]), verbose=0), plain.predict(X[:37], verbose=0)
    assert found.shape == wanted.shape and set(here) == set(there), (found.shape, here, there)
    return near(apart(found, wanted), apart([here[name] for name in there], there.values()))


class Guided(keras.Model):
    """The steps of Keras' guide, with trackers of their own; `raw` returns numbers in place of results."""

    raw = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own = [] if self.raw else [keras.metrics.Mean(name="loss"), keras.metrics.MeanAbsoluteError(name="mae")]
        self.trackers = own

    @property
    def metrics(self) -> Any:
        return self.trackers or super().metrics

    def _logs(self, loss: Any, x: Any, y: Any, out: Any) -> Any:
        if self.raw:
            return {"loss": loss, "mae": keras.ops.mean(keras.ops.abs(y - out))}
        self.trackers[0].update_state(keras.ops.mean(keras.ops.square(y - out), -1))
        self.trackers[1].update_state(y, out)
        return {tracker.name: tracker.result() for tracker in self.trackers}

    def train_step(self, data: Any) -> Any:
        x, y = data
        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                out = self(x, training=True)
                loss = self.compute_loss(x=x, y=y, y_pred=out)
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            return self._logs(loss, x, y, out)
        self.zero_grad()
        out = self(x, training=True)
        loss = self.compute_loss(x=x, y=y, y_pred=out)
        loss.backward()
        self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
        return self._logs(loss, x, y, out)

    def test_step(self, data: Any) -> Any:
        x, y = data
        out = self(x, training=False)
        return self._logs(self.compute_loss(x=x, y=y, y_pred=out), x, y, out)


class RawGuided(Guided):
    raw = True


def guided(kind: type[Guided]) -> keras.Model:
    keras.utils.set_random_seed(1)
    x = L.Input((5,))
    model = kind(x, L.Dense(5)(L.Dense(4, activation="tanh")(x)))
    model.compile(O.SGD(0.1), "mse", jit_compile=False, run_eagerly=kind is Guided)
    return model


HELD_OUT = slice(44, 57)


@case
def validates_own_trackers_on_all_samples_each() -> str:
    """The model does not use Keras' tracker of the loss, which counts the samples otherwise."""
    val = {"validation_data": (X[HELD_OUT], X[HELD_OUT]), "validation_batch_size": BATCH}
    return alike(lambda: guided(Guided), X[:44], X[:44], fit=val)


@case
def logs_of_a_step_that_no_metric_has() -> str:
    """`{"loss": loss}` of a step is no result of the metric of that name: it is that of the last global batch."""
    near(evaluated(hvk.prepare(guided(RawGuided)), X[:37], X[:37]))
    return both(lambda: guided(RawGuided), X[:44], X[:44], (X[HELD_OUT], X[HELD_OUT]))


@case
def evaluates_a_loader_in_a_callback() -> str:
    seen: list[Any] = []

    def look(model: keras.Model, *data: Any) -> K.Callback:
        def at_the_end(epoch: int, logs: Any) -> None:
            seen.extend([*model.evaluate(*data, verbose=0), model.predict(data[0], verbose=0)])

        return K.LambdaCallback(on_epoch_end=at_the_end)

    model, plain = hvk.prepare(net(metrics=["accuracy"])), net(metrics=["accuracy"])
    ours(model, deal(X[:44], Y[:44]), callbacks=[look(model, deal(X[HELD_OUT], Y[HELD_OUT]))])
    plainly(plain, X[:44], Y[:44], callbacks=[look(plain, X[HELD_OUT], Y[HELD_OUT])])
    assert seen[2].shape == seen[5].shape, seen
    return near(apart(seen[:3], seen[3:]))


@case
def masks_with_weights_of_steps() -> str:
    """Keras on torch multiplies the weights by the mask in place."""
    x = np.where(
        np.arange(STEPS)[None, :, None] > np.arange(40)[:, None, None] % STEPS, 0.0, RNG.normal(size=(40, STEPS, 2))
    )

    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([L.Input((STEPS, 2)), L.Masking(), L.SimpleRNN(3, return_sequences=True), L.Dense(1)])
        model.compile(O.SGD(0.1), keras.losses.MeanSquaredError("mean_with_sample_weight"), run_eagerly=True)
        return model

    return alike(make, x, RNG.normal(size=(40, STEPS, 1)), np.abs(RNG.normal(size=(40, STEPS))))


def two_headed() -> keras.Model:
    keras.utils.set_random_seed(1)
    entry = L.Input((5,))
    model = keras.Model(entry, {"a": L.Dense(3, name="a")(entry), "b": L.Dense(1, name="b")(entry)})
    model.compile(O.SGD(0.1), {"a": sparse(), "b": "mse"})
    return model


@case
def losses_of_outputs_of_the_whole_batch() -> str:
    return alike(two_headed, X[:37], {"a": Y[:37], "b": X[:37, :1] ** 2}, whole=True)


@case
def nothing_to_train() -> str:
    def make() -> keras.Model:
        model = net()
        model.trainable = False
        model.compile(O.Adam(0.1), crossentropy(), run_eagerly=True)
        return model

    return alike(make, X[:37], Y[:37], epochs=1)


@case
def a_loss_that_is_next_to_nothing() -> str:
    """Rounding is all that is left of it: other pieces of the batch have another rounding."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([L.Input((5,)), L.Dense(500), L.Dense(1)])  # wide: so that pieces do have another rounding
    model.compile(O.SGD(0.01), "mse", run_eagerly=True)
    first, bias, second, its = weights_of(model)
    data = deal(X, np.asarray(X @ (first @ second) + (bias @ second + its)))
    loss = ours(hvk.prepare(model, data), data, 3).history["loss"]
    assert 0 < max(loss) < 1e-12, loss
    return "it trains on"


@case
def names_metrics_that_follow_batches() -> str:
    """A mean of batches' means; and in a step of one's own, metrics of which nothing is known."""

    class OfBatches(keras.metrics.Mean):
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.total.assign_add(keras.ops.mean(keras.ops.cast(y_pred, self.dtype)))
            self.count.assign_add(1.0)

    own = guided(Guided)
    own.trackers.append(keras.metrics.Sum(name="total"))
    for model, y, text in (
        (net(metrics=[OfBatches("of_batches")]), Y, "not the metric of one process: of_batches is"),
        (own, X, "the states of total are added up over ranks"),
    ):
        printed = noted(model, X[:24], y[:24])
        assert RANK or text in printed, printed
    return "named"


class Largest(keras.metrics.Metric):
    """A metric whose state is declared to be averaged over ranks."""

    def __init__(self) -> None:
        super().__init__(name="mean_of_x")
        self.seen = self.add_variable((), "zeros", aggregation="mean", name="seen")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen.assign(2.0 + keras.ops.cast(keras.ops.max(y_true), self.seen.dtype))

    def result(self) -> Any:
        return self.seen.value


@case
def averages_a_metric_that_says_so() -> str:
    """Ranks hold 9 and 4 of 13 samples... each rank's state counts by its samples."""
    model = hvk.prepare(net(O.SGD(0.0), metrics=[Largest()], traced=True))  # Keras itself cannot do it eagerly
    mine = slice(0, 9) if RANK == 0 else slice(9, 13)
    logs = ours(model, X[mine], y=np.where(np.arange(13) < 9, 0, 2)[mine], batch_size=9).history
    expected = (9 * 2.0 + 4 * 4.0) / 13
    assert abs(logs["mean_of_x"][0] - expected) < 1e-6, (logs, expected)
    return f"{logs['mean_of_x'][0]:.6f}"


@case
def normalises_by_live_samples_only() -> str:
    """Moving statistics: the mean over ranks of what plain Keras has after each rank's own samples; validation, too."""

    def make() -> keras.Model:
        return net(O.SGD(0.0), layers=[L.BatchNormalization(momentum=0.7)], traced=True)

    model, val = hvk.prepare(make()), (X[13:30], Y[13:30])
    # rank 0: 6 and 1 samples, rank 1: 6 and none
    logs = ours(model, deal(X[:13], Y[:13]), validation_data=deal(*val)).history
    expected = []
    for rank in range(SIZE):
        plain = make()
        for rows in (slice(rank * 6, rank * 6 + 6), slice(12 + rank, 13)):
            if rows.stop > rows.start:
                plain.train_on_batch(X[rows], Y[rows])
        expected.append([numpy_of(v) for v in plain.non_trainable_weights])
    averaged = [np.mean(both, axis=0) for both in zip(*expected, strict=True)]
    for variable, value in zip(plain.non_trainable_weights, averaged, strict=True):
        variable.assign(value)
    assert apart(expected[0], expected[1]) > 1e-3, expected
    validated = abs(logs["val_loss"][0] - plain.evaluate(*val, batch_size=BATCH, verbose=0))
    return near(apart([numpy_of(v) for v in model.non_trainable_weights], averaged), validated)


@case
def goes_on_accumulating() -> str:
    """Two fits of two steps, three steps an update: the second goes on with what the first accumulated."""
    model, plain = (net(O.SGD(0.5, gradient_accumulation_steps=3), traced=True) for _ in range(2))
    hvk.prepare(model)
    for part in (slice(0, 24), slice(24, 48)):
        ours(model, deal(X[part], Y[part]))
        plainly(plain, X[part], Y[part])
    return near(between(model, plain))


@case
def counts_every_step_of_an_execution() -> str:
    """steps_per_execution: steps, samples, and comparisons of replicas every so many steps."""
    model = hvk.prepare(net(traced=True, steps_per_execution=2 if BACKEND == "tensorflow" else 1), watch_every=2)
    callbacks = hvk.callbacks(model, run=_Log())
    with mock.patch.object(replicas, "check_equal", wraps=replicas.check_equal) as compared:
        model.fit(deal(X[:48], Y[:48]), epochs=2, verbose=0, callbacks=callbacks)
    count = vars(model)["_hvdtrain"].place.progress
    assert count == hvdtrain.Progress(epoch=2, step=8, samples_seen=96), count
    watched = [call.kwargs["when"] for call in compared.call_args_list]
    watched = [when for when in watched if when.startswith("after step")]
    assert len(watched) == 4, watched
    return str(watched)


class _Log:
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.facts = RunFacts()

    def step(self, *, loss: float, **facts: Any) -> None:
        self.losses.append(loss)

    def epoch(self, *arguments: Any) -> None:
        pass


@case
def records_the_loss_of_the_global_batch() -> str:
    """Step by step, tails included; not the running mean, nor one rank's; of a prepared optimizer's model, too."""
    plain, gaps = net(), []
    batches = [slice(first, min(first + BATCH, 37)) for first in range(0, 37, BATCH)]
    expected = [plain.train_on_batch(X[rows], Y[rows]) for rows in [*batches, *batches]]
    for model in (hvk.prepare(net(traced=True)), net(hvk.prepare(O.SGD(0.3)))):
        log = _Log()
        callbacks = hvk.callbacks(model, run=log)
        model.fit(deal(X[:37], Y[:37]), epochs=2, verbose=0, callbacks=callbacks)
        gaps.append(apart(log.losses, np.ravel(expected)))
    return near(*gaps)


@case
def halves_before_the_sum() -> str:
    """compression="fp16": gradients of 40000 on both ranks do not overflow on their way."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([L.Input((1,)), L.Dense(1, use_bias=False) if BACKEND == "tensorflow" else L.Dense(1)])
    model.compile(O.SGD(1e-6), lambda y, p: 40000.0 * keras.ops.squeeze(p, -1))
    before = weights_of(model)
    ours(hvk.prepare(model, compression="fp16"), deal(np.ones((12, 1)), np.ones((12, 1))))
    moved = float((before[0] - weights_of(model)[0]).squeeze())
    assert abs(moved - 0.04) < 1e-3, moved
    return f"{moved:.4f}"


@case
def prepared_again_with_another_option() -> str:
    """What was traced for the first ``prepare`` is not used after the second."""
    model, data = hvk.prepare(net(O.SGD(1.0), traced=True), verify=False), deal(X[:12], Y[:12])
    ours(model, data)
    for variable, value in zip(model.weights, weights_of(net(seed=2)), strict=True):
        variable.assign(value)
    ours(hvk.prepare(model, compression="fp16", verify=False), data)
    plain = net(O.SGD(1.0), seed=2)
    plainly(plain, X[:12], Y[:12])
    gap = between(model, plain)
    assert 1e-8 < gap < 1e-2, f"{gap}: float16 left no trace"
    return f"{gap:.1e}"


@case
def schedule_free() -> str:
    """Keras on TensorFlow starts its momentum anew in every step, unless the optimizer is built before ``fit``."""
    model, plain = (net(O.ScheduleFreeAdamW(1e-2), traced=True) for _ in range(2))
    plain.optimizer.build(plain.trainable_variables)
    ours(hvk.prepare(model), deal(X[:48], Y[:48]), 3)
    plainly(plain, X[:48], Y[:48], 3)
    return near(between(model, plain))


class StopsAtStep(K.Callback):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.left = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        self.model.stop_training = self.left == 0


class Notes(K.Callback):
    """What it is called for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: list[str] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls.append("begin")
        super().on_train_begin(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(str(epoch))
        super().on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        self.calls.append("end")
        super().on_train_end(logs)


class Writes(Notes, K.CSVLogger):
    """A user's own, which writes a file: called on rank 0 only."""


@case
def a_restored_fit_is_one_training_for_callbacks() -> str:
    """The rest of an epoch and the others are one `fit`. Its beginning and end are seen once, by a callback of a user,
    by one whose methods are its instance's own, and by one that writes, on rank 0; in each way it may end. The twin: a
    `fit` after it begins again."""
    model = hvk.prepare(net())
    with shared_folder() as folder:
        checkpoints = hvdtrain.Checkpointer(folder / "checkpoints", best=None)
        own = hvk.callbacks(model, checkpointer=checkpoints)
        model.fit(deal(X[:48], Y[:48]), epochs=3, verbose=0, callbacks=[StopsAtStep(6), *own])
        for ends, epochs in ((None, ["1", "2"]), (1, ["1"]), (3, ["1", "2"])):  # after that step: in the rest, or later
            new = hvk.prepare(net())
            checkpoints.restore(hvk.model_state(new))
            notes, path, called = Notes(), folder / f"{ends}.csv", []
            writes = Writes(path)
            lambdas = K.LambdaCallback(
                on_train_begin=lambda logs, called=called: called.append("begin"),
                on_train_end=lambda logs, called=called: called.append(sorted(logs)),
            )
            callbacks = [notes, writes, lambdas, *([StopsAtStep(ends)] if ends else []), *hvk.callbacks(new)]
            data = deal(X[:48], Y[:48])
            new.fit(data, initial_epoch=1, epochs=3, verbose=0, callbacks=callbacks)
            once = ["begin", *epochs, "end"]
            assert (notes.calls, called) == (once, ["begin", ["loss"]]), (ends, notes.calls, called)
            assert writes.calls == (once if RANK == 0 else []), (ends, writes.calls)
            world.barrier()
            lines = path.read_text().splitlines()
            assert [line.split(",")[0] for line in lines] == ["epoch", *epochs], (ends, lines)
        new.fit(data, initial_epoch=2, epochs=3, verbose=0, callbacks=callbacks)
        assert notes.calls[-3:] == ["begin", "2", "end"] and len(called) == 4, (notes.calls, called)
    return "once"


# ---------------------------------------------------------------------------- refused
def trained(model: keras.Model, labels: Any = None, **options: Any) -> None:
    ours(hvk.prepare(model), deal(X[:24], Y[:24] if labels is None else labels), **options)


cases(
    fit_with_y=lambda: trained(net(), y=Y[:24]),
    fit_with_sample_weight=lambda: trained(net(), sample_weight=np.ones(24)),
    fit_with_class_weight=lambda: trained(net(), class_weight={0: 1.0, 1: 2.0, 2: 1.0}),
    fit_with_steps=lambda: trained(net(), steps_per_epoch=1),
    fit_with_batch_size=lambda: trained(net(), batch_size=8),
    both_kinds_of_weights=lambda: deal(X[:24], Y[:24], np.ones(24), class_weight={0: 2.0}),
    classes_in_text=lambda: deal(X[:24], Y[:24], class_weight={"0": 2.0}),
    sparse_tensors=lambda: hvk.loader(tf_dataset(sparse_x=True).batch(4)),
    single_samples=lambda: hvk.loader(tf_dataset()),
    repeated_without_end=lambda: hvk.loader(tf_dataset().batch(4).repeat()),
    shuffled_by_tensorflow=lambda: hvk.loader(tf_dataset().shuffle(60).batch(4)),
    another_loss=lambda: compiled_apart("mae" if RANK else "mse"),
    other_loss_weights=lambda: compiled_apart(["mse", "mse"], [1.0, 1.0 + RANK]),
)


class Halving(keras.callbacks.Callback):
    """Halves the rate where a batch's loss, which is this rank's own, grew."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch and logs["loss"] > self.last:
            self.model.optimizer.learning_rate = 0.5 * float(self.model.optimizer.learning_rate)
        self.last = logs["loss"]


@case
def rate_by_the_logs_of_a_batch() -> str:
    ours(hvk.prepare(net()), deal(X, Y), 2, [Halving()])
    return "trained"


@case
def stateful() -> str:
    recurrent = L.LSTM(3, stateful=True, name="lstm")
    model = keras.Sequential([L.Input(batch_shape=(BATCH // SIZE, 4, 1)), recurrent, L.Dense(3)])
    model.compile(O.SGD(0.1), sparse())
    hvk.prepare(model)
    return "prepared"


def compiled_apart(loss: Any, weights: Any = None) -> None:
    keras.utils.set_random_seed(1)
    x, y = L.Input((5,)), X[:24, :1]
    model = keras.Model(x, [L.Dense(1)(x), L.Dense(1)(x)] if weights else L.Dense(1)(x))
    model.compile(O.SGD(0.1), loss, loss_weights=weights, run_eagerly=True)
    trained(model, (y, y) if weights else y)


def tf_dataset(samples: int = 60, sparse_x: bool = False) -> Any:
    import tensorflow as tf

    x = tf.sparse.from_dense(X) if sparse_x else X[:samples]
    return tf.data.Dataset.from_tensor_slices((x, Y[:samples]))


@case
def bar_of_rank_0() -> str:
    model = hvk.prepare(net())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        model.fit(deal(X[:24], Y[:24]), callbacks=hvk.callbacks(model))
    assert ("2/2" in printed.getvalue()) == (RANK == 0), printed.getvalue()
    return "one bar"


class Quiet(keras.Sequential):
    def fit(self, x: Any, epochs: int = 1, callbacks: Any = None) -> Any:  # type: ignore[override]
        return super().fit(x, epochs=epochs, callbacks=callbacks, verbose=0)


class QuietAlways(keras.Sequential):
    def fit(self, *args: Any, **options: Any) -> Any:
        return super().fit(*args, verbose=0, **options)


@case
def fits_by_a_method_without_verbose() -> str:
    def make(kind: Any) -> keras.Model:
        keras.utils.set_random_seed(1)
        model = kind([L.Input((5,)), L.Dense(3)])
        model.compile(O.SGD(0.3), sparse(), run_eagerly=True)
        return model

    gaps = []
    for kind in (Quiet, QuietAlways):
        model, plain, data = make(kind), make(keras.Sequential), deal(X, Y)
        hvk.prepare(model, data).fit(data, callbacks=hvk.callbacks(model))
        plainly(plain, X, Y)
        gaps.append(between(model, plain))
    return near(*gaps)


if __name__ == "__main__":
    run_cases("fits")
