"""What a checkpoint holds and what replicas share, on ranks that are all seeded alike.

usage: state.py FOLDER        writes FOLDER/state.rankR.json: case -> "passed ..." or the error's text
"""

from __future__ import annotations

import io
import threading
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import keras
import numpy as np
from common import L, apart, images, numpy_of, weights_of
from jobs import RANK, SIZE, case, compiled, fit, hvk, run_cases, shared_folder, world

import hvdtrain
from hvdtrain.comm import engines
from hvdtrain.core.errors import HvdtrainError, NonFiniteError
from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.state import replicas, rng


@contextmanager
def refused(*parts: str, kind: type[HvdtrainError] = HvdtrainError) -> Iterator[None]:
    try:
        yield
    except kind as error:
        missing = [part for part in parts if part not in str(error)]
        assert not missing, f"{missing} not in:\n{error}"
    else:
        raise AssertionError(f"not refused: {parts}")


def prepared(optimizer: Any = None, model: keras.Model | None = None, **options: Any) -> keras.Model:
    if model is None:
        model = compiled(optimizer, **options)
    else:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # tracing takes longer than these steps
        model.compile(optimizer or keras.optimizers.SGD(0.1), loss, run_eagerly=True)
    return hvk.prepare(model, verify=False)


def small(*layers: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    return keras.Sequential([L.Input((6, 6, 1)), L.Flatten(), *layers, L.Dense(4)])


def batches(samples: int = 32) -> Any:
    x, y = images(samples)
    return hvk.loader((x.astype("float32"), y), 16 // SIZE)


def run(model: keras.Model, checkpoints: hvdtrain.Checkpointer | None, epochs: int = 1, **options: Any) -> None:
    data = batches(options.pop("samples", 32))
    fit(model, hvk.callbacks(model, checkpointer=checkpoints, **options), epochs, data)


class OwnData(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        x, y = images(8)
        return x.astype("float32") + RANK, y


def saved(path: Path) -> list[tuple[int, int, int]]:
    infos = hvdtrain.Checkpointer(path).list()
    return [(info.progress.epoch, info.progress.step, info.progress.samples_in_epoch) for info in infos]


@case
def case_k9_divergence_keeps_the_good_checkpoints() -> None:
    with shared_folder() as path:
        model = prepared()
        checkpoints = hvdtrain.Checkpointer(path, best=None)
        run(model, checkpoints, epochs=2)
        good, before = weights_of(model), saved(path)
        model.optimizer.learning_rate = float("inf")
        with redirect_stdout(io.StringIO()) as printed:
            run(model, checkpoints, epochs=5)
        diverged = "no checkpoint after step 6: weights that are not finite are not saved: training has diverged"
        assert printed.getvalue().count(diverged) == world.is_main, printed.getvalue()
        assert not np.isfinite(weights_of(model)[0]).all(), "it has diverged"
        assert saved(path) == before and [epoch for epoch, *_ in before] == [1, 2]
        with refused("weights that are not finite are not saved", "rank 0: ", kind=NonFiniteError):
            checkpoints.save(hvk.model_state(model), progress=hvdtrain.Progress())
        progress = checkpoints.restore(hvk.model_state(model))
        assert apart(weights_of(model), good) == 0
        ours = hvk.callbacks(model, checkpointer=checkpoints)
        model.fit(batches(), initial_epoch=progress.epoch, epochs=progress.epoch + 1, verbose=0, callbacks=ours)
        assert [epoch for epoch, *_ in saved(path)] == [1, 2, 3]
        assert np.isfinite(weights_of(model)[0]).all()


@case
def case_two_models_share_no_directory() -> None:
    with shared_folder() as path:
        model, other, copied = prepared(), prepared(), prepared()
        run(model, hvdtrain.Checkpointer(path, best=None))
        ours = hvdtrain.Checkpointer(path, best=None)
        with refused("a checkpoint directory belongs to one training: this model must not save there"):
            ours.save(hvk.model_state(other), progress=hvdtrain.Progress(step=9))
        assert ours.restore(hvk.model_state(copied)) is not None
        ours.save(hvk.model_state(model), progress=hvdtrain.Progress(epoch=1, step=9))  # whatever a copy did
        run(other, hvdtrain.Checkpointer(path / "own", best=None))
        assert [step for _, step, _ in saved(path)] == [2, 9] and len(saved(path / "own")) == 1


@case
def case_k11_save_every_is_kept_with_several_steps_an_execution() -> None:
    """10 updates an epoch of 16 samples, 4 at a time (not on PyTorch); a mid-epoch checkpoint knows its samples."""
    with shared_folder() as path:
        model = prepared(
            keras.optimizers.SGD(0.01), traced=True, steps_per_execution=4 if BACKEND.name == "tensorflow" else 1
        )
        run(model, hvdtrain.Checkpointer(path, keep=99, best=None), epochs=2, samples=160, save_every=3)
        wanted = [(0, 4, 64), (0, 8, 128), (1, 10, 0), (1, 14, 64), (1, 18, 128), (2, 20, 0)]
        if BACKEND.name == "torch":
            wanted = [(0, s, 16 * s) for s in (3, 6, 9)] + [(1, 10, 0)]
            wanted += [(1, s, 16 * (s - 10)) for s in (12, 15, 18)] + [(2, 20, 0)]
        assert saved(path) == wanted, saved(path)
    with shared_folder() as path:
        model = prepared(keras.optimizers.SGD(0.01))
        run(model, hvdtrain.Checkpointer(path, keep=99, best=None), epochs=1, samples=160, save_every=4)
        assert saved(path) == [(0, 4, 64), (0, 8, 128), (1, 10, 0)], saved(path)
        with refused("save_every=4, data that hvdtrain does not deal"):
            own = hvk.callbacks(model, checkpointer=hvdtrain.Checkpointer(path), save_every=4)
            fit(model, own, 1, OwnData())


class StopsAtStep2(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = batch == 1


class PassesOn(keras.Sequential):
    """Has a fit of its own, which takes whatever Keras' does."""

    def fit(self, *args: Any, **options: Any) -> Any:
        return super().fit(*args, **options)


@case
def case_a_fit_of_the_models_own_knows_its_data_and_callbacks() -> None:
    with shared_folder() as path:
        model, data = prepared(model=PassesOn(small().layers)), batches(80)
        ours = hvk.callbacks(model, checkpointer=hvdtrain.Checkpointer(path, best=None))
        model.fit(data, epochs=2, verbose=0, callbacks=[*ours, StopsAtStep2()])
        assert saved(path) == [(0, 2, 32)], saved(path)
        model.fit(data, None, None, 1, 0, ours)
        assert saved(path)[-1] == (1, 7, 0), saved(path)


class Talkative(L.Dense):
    def load_own_variables(self, store: Any) -> None:
        warnings.warn("something else is old", DeprecationWarning, stacklevel=2)
        warnings.warn("and this is slow", UserWarning, stacklevel=2)
        super().load_own_variables(store)


@case
def case_k16_other_warnings_do_not_end_a_restore() -> None:
    with shared_folder() as path:
        checkpoints = hvdtrain.Checkpointer(path, best=None)
        model = prepared(model=small(Talkative(5)))
        checkpoints.save(hvk.model_state(model), progress=hvdtrain.Progress())
        for weight in model.weights:
            weight.assign(weight.value * 0)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            checkpoints.restore(hvk.model_state(model))
        assert float(np.abs(weights_of(model)[0]).max()) > 0
        assert {"something else is old", "and this is slow"} <= {str(warning.message) for warning in heard}
        other = prepared(keras.optimizers.SGD(0.1, momentum=0.9), small(Talkative(5)))
        with refused("must be of this model and optimizer", "Skipping variable loading for optimizer"):
            checkpoints.restore(hvk.model_state(other))


class Counter:
    def __init__(self) -> None:
        self.seen: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "by": {3: [np.float32(0.5), (True, None)]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["by"] == {3: [0.5, (True, None)]}
        self.seen = state["seen"]


@case
def case_t15_own_objects_have_a_slot() -> None:
    with shared_folder() as path:
        checkpoints = hvdtrain.Checkpointer(path, best=None)
        model, average = prepared(model=small()), small()
        average.set_weights([weight + 1 for weight in weights_of(model)])
        counter, rate, table = Counter(), keras.Variable(0.25), np.arange(4.0)
        counter.seen = np.int64(7)
        extra: dict[str, Any] = {"ema": average, "counter": counter, "rate": rate, "table": table}
        extra |= {"best": float("nan"), "note": ("a", 1)}
        checkpoints.save(hvk.model_state(model, extra=extra), progress=hvdtrain.Progress())
        other, fresh = small(), np.zeros(4)
        back: dict[str, Any] = {"ema": other, "counter": Counter(), "rate": keras.Variable(9.0), "table": fresh}
        back |= {"best": 1, "note": None}
        checkpoints.restore(hvk.model_state(model, extra=back))
        assert apart(weights_of(other), weights_of(average)) == 0
        assert back["counter"].seen == 7 and float(numpy_of(back["rate"])) == 0.25 and fresh.tolist() == [0, 1, 2, 3]
        assert back["best"] != back["best"] and back["note"] == ("a", 1)
        with refused("extra['ema']", "Sequential"):
            checkpoints.restore(hvk.model_state(model, extra={"ema": small(L.Dense(3))}))
        with refused("lacks other", "it has best, counter"):
            checkpoints.restore(hvk.model_state(model, extra={"other": 1}))
        with refused("extra['x'][1] is a set"):
            checkpoints.save(hvk.model_state(model, extra={"x": [1, {2}]}), progress=hvdtrain.Progress(step=1))
        assert len(checkpoints.list()) == 1


class Queue(L.Layer):
    """As in MoCo: unit-norm rows that every rank fills with its own keys."""

    def build(self, shape: Any) -> None:
        self.queue = self.add_weight(shape=(5, 3), name="queue", trainable=False)

    def call(self, x: Any) -> Any:
        return x


@case
def case_t8_only_moving_statistics_are_averaged() -> None:
    model = prepared(model=small(Queue(), L.BatchNormalization()))
    own = np.random.default_rng(RANK).normal(size=(5, 3)).astype("float32")
    own /= np.linalg.norm(own, axis=1, keepdims=True)
    queue = next(layer for layer in model.layers if isinstance(layer, Queue)).queue
    norm = next(layer for layer in model.layers if isinstance(layer, L.BatchNormalization))
    queue.assign(own)
    norm.moving_mean.assign(np.full(norm.moving_mean.shape, float(RANK)))
    replicas.average_statistics(model, world)
    assert np.array_equal(numpy_of(queue), world.gather(own)[0]), "rank 0's, bit for bit"
    assert np.allclose(numpy_of(norm.moving_mean), (SIZE - 1) / 2, rtol=0, atol=0)


@case
def case_t8_checksums_see_the_order() -> None:
    kinds = ("float32", "float64", "float16", "bfloat16", "int32", "uint8", "bool")
    pairs = [([3, 1], [1, 3]), ([[0, 1], [1, 0]], [[1, 0], [0, 1]]), ([1, 0, 0], [0, 0, 1])]
    for kind in kinds:
        for one, other in pairs:
            if kind == "bool" and 3 in one:
                continue
            variables = [keras.Variable(np.array(value), dtype=kind, trainable=False) for value in (one, other, one)]
            sums = [replicas.checksum(variable) for variable in variables]
            assert sums[0] != sums[1] and sums[0] == sums[2], (kind, one)


@case
def case_k17_frozen_weights_do_not_travel() -> None:
    frozen = L.Dense(300)
    model = prepared(model=small(frozen, L.BatchNormalization()))
    frozen.trainable = False
    sent: list[int] = []
    through = BACKEND.host_allreduce

    def counted(array: np.ndarray, *args: Any) -> np.ndarray:
        sent.append(array.size)
        return through(array, *args)

    with mock.patch.object(BACKEND, "host_allreduce", counted):
        replicas.average_statistics(model, world)
    assert 0 < sum(sent) < 100, sent  # checksums; the layer has 11,100 weights


def seeds(model: keras.Model) -> list[list[int]]:
    return world.gather([int(word) for v in rng.seed_variables(model).values() for word in numpy_of(v).reshape(-1)])


@case
def case_m_ranks_seeded_alike_draw_other_masks() -> None:
    model = prepared(model=small(L.Dropout(0.5), L.Dropout(0.5, seed=4)))
    assert len({str(words) for words in seeds(model)}) == 1, "the same to begin with"
    run(model, None)
    assert len({str(words) for words in seeds(model)}) == SIZE
    x = np.ones((1, 36), "float32")
    masks = [numpy_of(layer(x, training=True)) for layer in model.layers if isinstance(layer, L.Dropout)]
    for mask in masks:
        assert len({found.tobytes() for found in world.gather(mask)}) == SIZE


@case
def case_m_another_world_size_gives_every_rank_a_stream_of_its_own() -> None:
    """The checkpoint of one rank more, whose random states are all there."""
    with shared_folder() as path:
        checkpoints = hvdtrain.Checkpointer(path, best=None)
        model = prepared(model=small(L.Dropout(0.5)))
        state = hvk.model_state(model)
        for part in state.values():
            part.collect()
        state["random.npz"].states.append(state["random.npz"].states[0])
        with mock.patch.object(type(state["random.npz"]), "collect", lambda self: None):
            checkpoints.save(state, progress=hvdtrain.Progress())
        found = []
        for _ in range(2):
            again = prepared(model=small(L.Dropout(0.5)))
            checkpoints.restore(hvk.model_state(again))
            run(again, None)
            found.append(seeds(again))
        assert len({str(words) for words in found[0]}) == SIZE
        assert found[0] == found[1], "they follow from the checkpoint"


@case
def case_m_what_is_longer_than_a_message_arrives_whole() -> None:
    content = np.random.default_rng(RANK).integers(0, 256, 10_007, np.uint8).tobytes()
    with mock.patch.object(engines, "CHUNK_BYTES", 1000), mock.patch.object(replicas, "CHUNK_BYTES", 1000):
        for root in range(SIZE):
            wanted = np.random.default_rng(root).integers(0, 256, 10_007, np.uint8).tobytes()
            assert world.comm.broadcast_bytes(content if root == RANK else None, root) == wanted
        variables = [keras.Variable(np.full((n,), RANK + n, "float32")) for n in (3, 700, 1, 250)]
        replicas.broadcast(variables, world, root=SIZE - 1)
    for variable in variables:
        assert (numpy_of(variable) == SIZE - 1 + variable.shape[0]).all()


@case
def case_m_optimizer_slots_are_rank_0s() -> None:
    model = prepared(keras.optimizers.Adam(1e-3))
    model.optimizer.build(model.trainable_variables)
    for slot in model.optimizer.variables:
        if "float" in str(slot.dtype) and slot is not model.optimizer._learning_rate:
            slot.assign(numpy_of(slot) + RANK + 1)
    before = world.gather([numpy_of(slot) for slot in model.optimizer.variables])[0]
    seen: list[Any] = []

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            seen.extend(numpy_of(slot) for slot in model.optimizer.variables)

    data = batches()
    fit(model, [*hvk.callbacks(model), Look()], 1, data)
    assert apart(seen, before) == 0


class Hoarder(L.Layer):
    """Saves what is no variable; meanwhile the program saves another model in a thread of its own."""

    def __init__(self, other: keras.Model | None = None, path: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._whole = (other, path)

    def _save_it(self) -> None:
        other, path = self._whole
        if other is not None:
            thread = threading.Thread(target=other.save, args=(path,))
            thread.start()
            thread.join()

    def get_config(self) -> dict[str, Any]:
        self._save_it()  # before the weights
        return {"name": self.name}

    def call(self, x: Any) -> Any:
        return x

    def save_own_variables(self, store: Any) -> None:
        self._save_it()
        store["array"], store["tensor"] = np.arange(6).reshape(2, 3), keras.ops.ones((3,), "float16")
        store["number"], store["flags"] = np.float64(0.5), np.array([True, False])

    def load_own_variables(self, store: Any) -> None:
        pass


def contents(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns every entry, but for the date, of the weights each group's and array's own; and their order."""
    found: dict[str, Any] = {}
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        for name in set(names) - {"metadata.json", "model.weights.h5"}:
            found[name] = archive.read(name)
        weights = io.BytesIO(archive.read("model.weights.h5"))
    with h5py.File(weights) as file:

        def look(name: str, item: Any) -> None:
            array = isinstance(item, h5py.Dataset)
            value = (item.dtype.str, item.shape, item[()].tobytes()) if array else None
            found[f"weights/{name}"] = (dict(item.attrs), value)

        file.visititems(look)
    return found, names


@case
def case_what_another_process_writes_is_what_keras_does() -> None:
    with shared_folder() as path:
        beside = path / f"{RANK}.keras"
        words = L.StringLookup()
        words.adapt(np.array(["a", "b", "b", "c"]))  # saved as a file
        model = keras.Sequential([
            keras.Input((36,)), L.Dense(9000), L.BatchNormalization(), L.Dense(5, dtype="mixed_bfloat16"),
            L.Dense(4, dtype="bfloat16"), L.Dropout(0.5, seed=1), keras.Sequential([L.Dense(3), L.Dense(4)]),
            Hoarder(small(), str(beside)),
        ])  # fmt: skip
        model.words = words
        model.compile(keras.optimizers.Adam(1e-3, use_ema=True), "mse")
        hvk.prepare(model, world=world, verify=False)
        model.layers[0].bias.assign(np.full(9000, 3e38))  # finite, as their sum is not
        found = []
        for asynchronous in (False, True, True):  # the last into memory that was used before
            checkpoints = hvdtrain.Checkpointer(path / "c", world=world, asynchronous=asynchronous)
            at = checkpoints.save(hvk.model_state(model), progress=hvdtrain.Progress())
            checkpoints.wait()
            found.append(contents(at / "model.keras"))
        (whole, order), *others = found
        assert any(entry.startswith("assets/") for entry in whole), sorted(whole)
        assert len([entry for entry in whole if "/vars/" in entry]) > 9
        assert order[-1] != "model.weights.h5", "Keras itself wrote this one"
        for other, its_order in others:
            assert its_order[-1] == "model.weights.h5" and sorted(its_order) == sorted(order)
            assert other == whole, [name for name in whole if other.get(name) != whole[name]]
        if world.is_main:
            assert contents(beside)[1].index("model.weights.h5") == 2 and keras.saving.load_model(beside).built
        world.barrier()


@case
def case_factors_of_lora_go_on() -> None:
    def made() -> Any:
        model = keras.Sequential([keras.Input((4,)), L.Dense(3)])
        model.layers[0].enable_lora(2)
        model.compile("sgd", "mse")
        return hvk.prepare(model, world=world)

    model, again = made(), made()
    for index, variable in enumerate(model.variables):
        variable.assign(np.full(variable.shape, index + 1.0))
    with shared_folder() as path:
        checkpoints = hvdtrain.Checkpointer(path, world=world)
        checkpoints.save(hvk.model_state(model), progress=hvdtrain.Progress())
        checkpoints.restore(hvk.model_state(again))
    assert apart(weights_of(model), weights_of(again)) == 0


def averaging() -> keras.Model:
    return prepared(keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.8), small())


def swapped(model: keras.Model, first: int, last: int, **options: Any) -> None:
    """Fits it with its average swapped in at each epoch's end, by a callback before ours."""
    callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True), *hvk.callbacks(model, **options)]
    model.fit(batches(), initial_epoch=first, epochs=last, verbose=0, callbacks=callbacks)


class Halves(keras.callbacks.Callback):
    """Halves the rate after each epoch, and counts epochs and batches where a checkpoint can keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = {"epochs": np.zeros(1), "batches": np.zeros(1)}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.counted["batches"] += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.counted["epochs"] += 1
        self.model.optimizer.learning_rate = 0.5 * numpy_of(self.model.optimizer.learning_rate)


@case
def case_what_callbacks_set_at_the_beginning_and_end_of_epochs_and_batches_is_in_the_checkpoint() -> None:
    """Every checkpoint of a run leads to its end, whether callbacks come before or after ours."""

    def run(path: Path, which: Any = None, *, first: bool = False) -> tuple[list[np.ndarray], float, list[np.ndarray]]:
        model, halves = prepared(model=small()), Halves()
        checkpoints = hvdtrain.Checkpointer(path, best=None, keep=20)
        epoch = 0
        if which is None:
            own = hvk.callbacks(model, checkpointer=checkpoints, save_every=1, extra=halves.counted)
        else:
            epoch = checkpoints.restore(hvk.model_state(model, extra=halves.counted), which=which).epoch
            own = hvk.callbacks(model)
        others = [halves, keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.7 * rate)]
        order = [*others, *own] if first else [*own, *others]
        if epoch < 2:
            model.fit(batches(), epochs=2, initial_epoch=epoch, verbose=0, callbacks=order)
        rate = float(numpy_of(model.optimizer.learning_rate))
        return weights_of(model), rate, list(halves.counted.values())

    for first in (False, True):
        with shared_folder() as path:
            weights, rate, counted = run(path, first=first)
            assert counted[0] == 2 and counted[1] == 4, counted
            saved = sorted(info.path for info in hvdtrain.Checkpointer(path, best=None, keep=20).list())
            assert len(saved) == 4, saved
            for which in saved:
                weights_again, rate_again, counted_again = run(path, which)
                assert np.isclose(rate, rate_again, rtol=1e-6) and counted == counted_again, (which.name, counted_again)
                assert apart(weights, weights_again) <= 1e-6, which.name


@case
def case_a_checkpoint_holds_the_weights_and_not_the_average_that_is_swapped_in() -> None:
    whole, model, again = averaging(), averaging(), averaging()
    swapped(whole, 0, 3)
    with shared_folder() as path:
        checkpoints = hvdtrain.Checkpointer(path, best=None)
        swapped(model, 0, 2, checkpointer=checkpoints)
        checkpoints.restore(hvk.model_state(again))
    swapped(again, 2, 3)
    assert apart(weights_of(again), weights_of(whole)) <= 1e-6


@case
def case_an_optimizer_of_another_class_or_without_slots_is_not_loaded() -> None:
    with shared_folder() as path:
        checkpoints = hvdtrain.Checkpointer(path, best=None)
        model = prepared(keras.optimizers.Adam(), small())
        model.second = keras.optimizers.Adam()
        model.second.build(model.trainable_variables)
        checkpoints.save(hvk.model_state(model), progress=hvdtrain.Progress())
        with refused("optimizer adam in the checkpoint, lamb here"):
            checkpoints.restore(hvk.model_state(prepared(keras.optimizers.Lamb(), small())))
        again = prepared(keras.optimizers.Adam(), small())
        again.second = keras.optimizers.Adam()
        with refused("an optimizer must be built before", again.second.name):
            checkpoints.restore(hvk.model_state(again))
        again.second.build(again.trainable_variables)
        checkpoints.restore(hvk.model_state(again))


@case
def case_a_callback_list_of_keras_needs_neither_model_nor_history() -> None:
    model = prepared(model=small())
    history = model.fit(batches(), verbose=0, callbacks=keras.callbacks.CallbackList(hvk.callbacks(model)))
    assert len(history.history["loss"]) == 1


@case
def case_an_average_of_one_of_two_optimizers_knows_its_weights() -> None:
    model = prepared(keras.optimizers.Adam(use_ema=True), small())
    model.second = hvk.prepare(keras.optimizers.Adam())
    with refused("of several optimizers, one with use_ema", "is not built"):
        fit(model, hvk.callbacks(model), 1, batches())


@case
def case_metrics_of_a_resumed_epoch_are_those_of_all_its_samples() -> None:
    def history(path: Path, which: Path | None = None) -> dict[str, list[float]]:
        model = prepared(model=small())
        model.compile(keras.optimizers.SGD(0.1), model.loss, metrics=["accuracy"], run_eagerly=True)
        hvk.prepare(model, verify=False)
        checkpoints, epoch = hvdtrain.Checkpointer(path, best=None, keep=20), 0
        if which is not None:
            epoch = checkpoints.restore(hvk.model_state(model), which=which).epoch
        saves = {"checkpointer": checkpoints, "save_every": 1} if which is None else {}
        ours = hvk.callbacks(model, **saves)
        return model.fit(batches(48), initial_epoch=epoch, epochs=2, verbose=0, callbacks=ours).history

    with shared_folder() as path:
        whole = history(path)
        saved = [info for info in hvdtrain.Checkpointer(path, best=None, keep=20).list() if info.progress.epoch == 1]
        within = [info.path for info in saved if info.progress.samples_in_epoch]
        assert len(within) == 2, saved
        for which in within:
            again = history(path, which)
            assert all(abs(again[name][-1] - whole[name][-1]) <= 1e-6 for name in ("loss", "accuracy")), (whole, again)


@case
def case_what_callbacks_of_keras_have_counted_is_in_the_checkpoint() -> None:
    """A loss whose maximum is the first epoch's: the best epoch, the rate and the stop are those of an unbroken run."""

    def run(path: Path, file: Path, first: int, last: int) -> tuple[int, float, list[np.ndarray]]:
        model = prepared(model=small())
        checkpoints = hvdtrain.Checkpointer(path, best=None)
        if first:
            assert checkpoints.restore(hvk.model_state(model)).epoch == first
        options: dict[str, Any] = {"monitor": "loss", "mode": "max"}
        stopping = keras.callbacks.EarlyStopping(**options, patience=4, restore_best_weights=True)
        others = [
            stopping, keras.callbacks.ReduceLROnPlateau(**options, factor=0.5, patience=3),
            keras.callbacks.ModelCheckpoint(file, save_best_only=True, **options),
        ]  # fmt: skip
        ours = hvk.callbacks(model, checkpointer=checkpoints)
        model.fit(batches(), initial_epoch=first, epochs=last, verbose=0, callbacks=[*ours, *others])
        return stopping.stopped_epoch, float(numpy_of(model.optimizer.learning_rate)), weights_of(model)

    with shared_folder() as whole, shared_folder() as parts:
        stopped, rate, best = run(whole, whole / "best.keras", 0, 20)
        assert stopped == 4
        run(parts, parts / "first.keras", 0, 2)
        again = run(parts, parts / "second.keras", 2, 20)
        assert again[:2] == (stopped, rate) and apart(again[2], best) == 0, (again[:2], stopped, rate)
        world.barrier()
        assert (parts / "first.keras").exists() and not (parts / "second.keras").exists()


if __name__ == "__main__":
    run_cases("state")
