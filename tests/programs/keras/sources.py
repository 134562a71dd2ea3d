"""What Keras users give as data, dealt over the ranks, beside plain Keras that trains on the same global batches.

usage: sources.py FOLDER        writes FOLDER/sources.rankR.json: case -> "passed ..." or the error's text
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import keras
import numpy as np
from common import BACKEND, L, in_float64, loss, weights_of
from jobs import RANK, SIZE, O, case, hvk, run_cases, shared_folder, world

import hvdtrain

in_float64()
K = keras.callbacks
DRAW = np.random.default_rng(6)
X, Y = DRAW.normal(size=(60, 5)), DRAW.integers(0, 3, 60)
W = DRAW.uniform(0.5, 2, 60)
ROWS = 4  # of a batch of the data's own
EXACT = 1e-10
CLASSES = {0: 0.5, 1: 2.0}

Batches = list[tuple[Any, ...]]


def net(traced: bool = False) -> keras.Model:
    """A small model; where nothing depends on it, no step is traced: that takes longer than all of the steps."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([L.Input((5,)), L.Dense(4, activation="tanh"), L.Dense(3)])
    model.compile(O.SGD(0.3), loss(), metrics=["accuracy"], jit_compile=False, run_eagerly=not traced)
    return model


def cut(order: Any, weighted: bool = False) -> Batches:
    """Batches of `ROWS` samples, in this order; the last has what is left."""
    order = np.asarray(order)
    pieces = [order[at : at + ROWS] for at in range(0, len(order), ROWS)]
    return [(X[rows], Y[rows], W[rows]) if weighted else (X[rows], Y[rows]) for rows in pieces]


def joined(batches: Batches) -> tuple[Any, ...]:
    return tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))


def plain(epochs: list[Batches], classes: dict[int, float] | None = None) -> keras.Model:
    """Trained by hand on the batches of each step together."""
    model = net()
    for batches in epochs:
        for at in range(0, len(batches), SIZE):
            model.train_on_batch(*joined(batches[at : at + SIZE]), class_weight=classes)
    return model


def gap(model: keras.Model, other: keras.Model) -> str:
    pairs = zip(weights_of(model), weights_of(other), strict=True)
    worst = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
    assert worst < EXACT, worst
    return f"{worst:.1e}"


def trained(data: Any, epochs: int, traced: bool = False) -> keras.Model:
    model = hvk.prepare(net(traced), data)
    model.fit(data, epochs=epochs, verbose=0, callbacks=hvk.callbacks(model))
    return model


def refused(attempt: Callable[[], Any], *parts: str) -> None:
    try:
        attempt()
    except hvdtrain.HvdtrainError as error:
        assert all(part in str(error) for part in parts), error
        return
    raise AssertionError(f"not refused: {parts}")


def order_of(epoch: int, samples: int = 25) -> Any:
    return np.random.default_rng(epoch).permutation(samples)


@case
def generators_of_other_lengths() -> str:
    """Epochs of 3, 11 and 15 batches, the first of them with one sample: on 2 ranks one has none in the last step."""
    samples = (9, 41, 60)

    def begun(epoch: int) -> Iterator[Any]:
        yield from cut(order_of(epoch, samples[epoch]))

    model = trained(hvk.loader(begun), 3, traced=True)
    return gap(model, plain([cut(order_of(epoch, count)) for epoch, count in enumerate(samples)]))


@case
def weights_of_samples_and_classes() -> str:
    weighted = trained(hvk.loader(lambda: iter(cut(range(25), weighted=True))), 1)
    first = gap(weighted, plain([cut(range(25), weighted=True)]))
    classes = trained(hvk.loader(lambda: iter(cut(range(25))), class_weight=CLASSES), 1)
    return max(first, gap(classes, plain([cut(range(25))], CLASSES)))


class Batched(keras.utils.PyDataset):
    """Shuffles its samples after each epoch by numpy's generator, as users' do; notes what was read of it."""

    def __init__(self, samples: int = 25, **options: Any) -> None:
        super().__init__(**options)
        self.order = np.arange(samples)
        self.read: list[int] = []

    def __len__(self) -> int:
        return -(-len(self.order) // ROWS)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return cut(self.order)[index]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


@case
def a_data_set_by_index() -> str:
    """Batches in the data's order, then shuffled; samples shuffled by the data itself, the same on all ranks."""
    gaps = []
    for shuffle in (False, True):
        source = Batched(workers=1 + shuffle)
        data = hvk.loader(source, shuffle=shuffle)
        source.read.clear()
        seen: list[Batches] = []
        model = hvk.prepare(net(), data)
        for epoch in range(2):
            np.random.seed(RANK)  # ranks may have drawn apart by then
            model.fit(data, initial_epoch=epoch, epochs=epoch + 1, verbose=0, callbacks=hvk.callbacks(model))
            whole = cut(source.order.copy())
            seen.append([whole[index] for index in data.plan.order(epoch)])
        gaps.append(gap(model, plain(seen)))
        assert len(source.read) < 2 * len(source), "a rank reads its own batches only"
        assert len({str(order) for order in world.gather(source.order.tolist())}) == 1
    assert model is not None and (source.order != np.arange(25)).any()
    return max(gaps)


@case
def data_of_torch() -> str:
    if BACKEND != "torch":
        return "0"
    import torch
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset

    whole = TensorDataset(torch.from_numpy(X[:25]), torch.from_numpy(Y[:25]))
    in_order = plain([cut(range(25))] * 2)
    gaps = [gap(trained(hvk.loader(DataLoader(whole, batch_size=ROWS)), 2), in_order)]
    drawn = hvk.loader(DataLoader(whole, batch_size=ROWS, shuffle=True), seed=3)
    again = hvk.loader(DataLoader(whole, batch_size=ROWS, shuffle=True), seed=3)
    gaps.append(gap(trained(drawn, 2), trained(again, 2)))

    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(zip(X[:25], Y[:25], strict=True))

    for source in (whole, Stream()):  # samples: dealt as arrays are
        gaps.append(gap(trained(hvk.loader(source, ROWS, shuffle=False), 2), in_order))
    return max(gaps)


@case
def data_of_tensorflow() -> str:
    if BACKEND != "tensorflow":
        return "0"
    import tensorflow as tf

    samples = tf.data.Dataset.from_tensor_slices((X[:25], Y[:25]))
    seen: dict[int, Batches] = {}

    def of_epoch(epoch: int) -> Any:
        found = samples.shuffle(25, reshuffle_each_iteration=False).batch(ROWS)
        seen[epoch] = [tuple(part.numpy() for part in batch) for batch in found]
        return found

    model = trained(hvk.loader(of_epoch), 2)
    assert not (seen[0][0][0] == seen[1][0][0]).all()
    drawn = gap(model, plain([seen[0], seen[1]]))
    data = hvk.loader(samples.batch(ROWS))
    model = net()
    model.compile(O.SGD(0.3), model.loss, jit_compile=False, steps_per_execution=4)
    hvk.prepare(model, data)
    model.fit(data, verbose=0, callbacks=hvk.callbacks(model))
    return max(drawn, gap(model, plain([cut(range(25))])))


@case
def inputs_by_name() -> str:
    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        a, b = L.Input((5,), name="a"), L.Input((5,), name="b")
        model = keras.Model({"a": a, "b": b}, L.Dense(1)(L.Concatenate()([a, b])))
        model.compile(O.SGD(0.1), keras.losses.MeanSquaredError(), jit_compile=False, run_eagerly=True)
        return model

    named = [({"b": x * 2, "a": x}, y[:, None] * 1.0) for x, y in cut(range(25))]
    data = hvk.loader(lambda: iter(named))
    model = hvk.prepare(make(), data)
    model.fit(data, verbose=0, callbacks=hvk.callbacks(model))
    other = make()
    for at in range(0, len(named), SIZE):
        some = named[at : at + SIZE]
        x = {name: np.concatenate([its[name] for its, _ in some]) for name in "ab"}
        other.train_on_batch(x, np.concatenate([y for _, y in some]))
    return gap(model, other)


@case
def evaluated_and_validated() -> str:
    model = net()
    x, y = X[:25], Y[:25]
    right = model.evaluate(x, y, verbose=0, return_dict=True)
    hvk.prepare(model)
    worst = 0.0
    for data in (lambda: iter(cut(range(25))), Batched()):
        found = hvk.evaluate(model, data)
        worst = max(worst, *(abs(found[name] - right[name]) for name in right))
    train, validation = (hvk.loader(lambda: iter(cut(range(25)))) for _ in range(2))
    history = hvk.prepare(model, train).fit(
        train, verbose=0, validation_data=validation, callbacks=hvk.callbacks(model)
    )
    other = plain([cut(range(25))])
    right = other.evaluate(x, y, verbose=0, return_dict=True)
    worst = max(worst, *(abs(history.history[f"val_{name}"][-1] - right[name]) for name in right))
    assert worst < EXACT, worst
    return f"{worst:.1e}"


@case
def predicted() -> str:
    """Every sample's outputs once, in the data's order, of any source; fewer samples than ranks, too."""
    keras.utils.set_random_seed(1)
    first = L.Input((5,))
    hidden = L.Dense(4, activation="tanh")(first)
    model = keras.Model(first, {"scores": L.Dense(3)(hidden), "hidden": hidden})
    model.compile(O.SGD(0.1), run_eagerly=True)
    worst = 0.0
    for samples in (1, 25):
        right = model.predict(X[:samples], verbose=0)
        sources: list[Any] = [X[:samples], (X[:samples], Y[:samples]), hvk.loader(X[:samples], 4, seed=2)]
        sources += [lambda samples=samples: iter(cut(range(samples))), Batched(samples), hvk.loader(Batched(samples))]
        for source in sources:
            batch = 3 if isinstance(source, (tuple, np.ndarray)) else None
            found = hvk.predict(model, source, per_rank_batch=batch)
            assert set(found) == set(right)
            worst = max(worst, *(float(np.abs(found[name] - right[name]).max()) for name in right))
            assert all(found[name].shape == right[name].shape for name in right)
    alone = hvk.predict(model, X[:5], per_rank_batch=2, on_main=True)
    assert (alone is None) == (RANK != 0)
    assert worst < EXACT, worst
    return f"{worst:.1e}"


class StopAfter(K.Callback):
    def __init__(self, batches: int) -> None:
        super().__init__()
        self.batches = batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch + 1 == self.batches:
            self.model.stop_training = True


@case
def resumed_at_the_batch() -> str:
    """Stopped after two steps of the second epoch, saved there; the rest is that of a run that was not stopped."""

    def make(**options: Any) -> Any:
        return hvk.loader(lambda epoch: iter(cut(order_of(epoch))), **options)

    with shared_folder() as folder:
        lr = hvdtrain.LR(base=0.3, reference_batch=ROWS * SIZE, schedule="cosine", total_samples=90)
        whole = hvk.prepare(net(), data := make(), lr=lr)
        whole.fit(data, epochs=3, verbose=0, callbacks=hvk.callbacks(whole))
        checkpoints = hvdtrain.Checkpointer(folder, best=None, world=world)
        model = hvk.prepare(net(), data := make(), lr=lr)
        model.fit(data, epochs=1, verbose=0, callbacks=hvk.callbacks(model))
        ours = hvk.callbacks(model, checkpointer=checkpoints)
        model.fit(data, initial_epoch=1, epochs=2, verbose=0, callbacks=[*ours, StopAfter(2)])
        again = hvk.prepare(net(), data := make(), lr=lr)
        progress = checkpoints.restore(hvk.model_state(again))
        assert progress is not None and progress.epoch == 1 and progress.samples_in_epoch == 2 * ROWS * SIZE
        ours = hvk.callbacks(again)
        wrong = partial(again.fit, make(seed=7), initial_epoch=1, epochs=2, verbose=0, callbacks=ours)
        refused(wrong, "seed 7", "it began with")
        for first in (1, 2):
            again.fit(data, initial_epoch=first, epochs=first + 1, verbose=0, callbacks=hvk.callbacks(again))
    return gap(again, whole)


@case
def refusals() -> str:
    draws = np.random.default_rng()
    refused(lambda: hvk.loader(iter(cut(range(9)))), "which can be read once", "the function that makes")
    refused(lambda: hvk.loader(lambda: iter(cut(draws.permutation(60)))), "read twice", "records(epoch)")
    refused(lambda: hvk.loader(lambda: iter(cut(range(9))), 8), "batches of 4, per_rank_batch=8")
    refused(lambda: hvk.loader(lambda: iter([])), "an epoch needs samples")
    refused(lambda: hvk.loader((X, Y)), "per_rank_batch was not given")
    refused(lambda: hvk.loader(lambda: iter([(X[:4], Y[:3])])), "lengths [4, 3]")
    refused(lambda: hvk.loader(lambda: iter(cut(range(9)))).samples, "LR(total_samples=")

    class Endless(keras.utils.PyDataset):
        num_batches = None

        def __getitem__(self, index: int) -> Any:
            return cut(range(9))[index % 2]

    refused(lambda: hvk.loader(Endless()), "must have a number of batches", "Endless")
    refused(lambda: hvk.loader(lambda: iter(cut(range(RANK, 60, 2)))), "the same on every rank", "split_by_node")
    later = [*range(59), 59 - RANK]
    data = hvk.loader(lambda: iter(cut(later)))
    refused(lambda: trained(data, 1), "an epoch of 60 samples", "same on every rank")
    return "all"


if __name__ == "__main__":
    run_cases("sources")
