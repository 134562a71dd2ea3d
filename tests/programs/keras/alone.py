"""What one process without Horovod can show: equality with plain Keras, and the data's order."""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

from common import block, cnn, images, loss, weights_of

block("horovod")

import keras  # noqa: E402
import numpy as np  # noqa: E402

import hvdtrain  # noqa: E402
from hvdtrain.comm import elastic  # noqa: E402
from hvdtrain.comm.elastic import Elastic  # noqa: E402
from hvdtrain.record.bottleneck import INPUT_SHARE  # noqa: E402
from hvdtrain.record.log import read_run  # noqa: E402


def train(prepared: bool) -> keras.Model:
    keras.utils.set_random_seed(4)
    model = cnn()
    model.add(keras.layers.Dropout(0.5))
    model.compile(keras.optimizers.Adam(1e-2), loss(), metrics=["accuracy"])
    callbacks = hvk.callbacks(hvk.prepare(model)) if prepared else []
    x, y = images(64)
    model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=callbacks)
    return model


class SlowData(keras.utils.PyDataset):
    """Batches that take their time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(self.seconds)
        return np.ones((4, 3), "float32"), np.ones((4, 2), "float32")


class SlowStep(keras.Sequential):
    def train_step(self, *data: object) -> object:
        time.sleep(0.3)
        return super().train_step(*data)


def refused_where_ranks_change() -> None:
    """What a `fit` of an elastic job needs, each missing for once."""
    x, y = images(16)

    def fit(data: Any = None, *, start: int = 0, ours: bool = True, built: bool = True, **options: Any):
        inside = [keras.Input((8, 8, 1))] if built else []
        layers = [keras.layers.BatchNormalization(), keras.layers.Flatten(), keras.layers.Dense(4)]
        model = keras.Sequential([*inside, *layers])
        model.compile(keras.optimizers.SGD(gradient_accumulation_steps=options.pop("passes", None)), loss())
        hvk.prepare(model, **options)
        data = hvk.loader((x, y), 4) if data is None else data
        if start:
            data.go_on(0, start)
        callbacks = hvk.callbacks(model) if ours else []
        model.fit(**({"x": x, "y": y} if data == "arrays" else {"x": data}), verbose=0, callbacks=callbacks)

    cases: dict[str, Callable[[], None]] = {
        "this fit() needs fit(hvdtrain.keras.loader(...)) of arrays": lambda: fit("arrays"),
        "or of a PyTorch Dataset with a length": lambda: fit(hvk.loader(lambda: iter([(x, y)]))),
        "this fit() needs callbacks=[*hvdtrain.keras.callbacks(model)": lambda: fit(ours=False),
        "this fit() needs a model that is built": lambda: fit(built=False),
        "this fit() needs sync_batchnorm=False": lambda: fit(sync_batchnorm=True),
        "this fit() needs optimizers without gradient_accumulation_steps": lambda: fit(passes=2),
        "this fit() needs to begin with a whole epoch": lambda: fit(start=4),
    }
    its = elastic._ranks = Elastic(SimpleNamespace(), new=False, answers=[])
    try:
        for said, case in cases.items():
            received = refusal(case)
            assert said in received, (said, received)
            assert "; " not in received, received  # that alone is missing
        its.member = SimpleNamespace()
        assert refusal(fit) == "this fit() needs one fit in the program, of one model"
    finally:
        elastic._ranks = elastic.JobRanks()


def refusal(case: Callable[[], None]) -> str:
    try:
        case()
    except hvdtrain.ConfigError as error:
        return error.received
    raise SystemExit("not refused")


def verdict_of(slow: str) -> tuple[str, dict[str, float]]:
    """What is said at the end of a recorded run that is slow on purpose, and the shares of what takes its time."""
    model = (SlowStep if slow == "train_step" else keras.Sequential)([keras.Input((3,)), keras.layers.Dense(2)])
    several = 2 if slow == "input" and keras.backend.backend() == "tensorflow" else 1
    model.compile("sgd", "mse", run_eagerly=slow == "train_step", steps_per_execution=several)
    hvk.prepare(model)
    pause = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: slow == "other" and time.sleep(0.3))
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
        with hvdtrain.RunLog(folder, world, config={}, tensorboard=False) as run:
            data = SlowData(0.3 if slow == "input" else 0.0)
            first = keras.callbacks.LambdaCallback(on_train_begin=lambda *_: model.evaluate(SlowData(0.0), verbose=0))
            model.fit(data, verbose=0, callbacks=[*hvk.callbacks(model, run=run), pause, first])
        recorded = read_run(folder)
    verdict = said.getvalue().splitlines()[-1].removeprefix("verdict: ")
    assert recorded is not None and verdict == recorded["result"]["verdict"], said.getvalue()
    return verdict, recorded["result"]["shares"]


def asked_of_gpus() -> list[tuple[object, ...]]:
    """What the backend is asked for by a rank that has the third of four GPUs, which are made up."""
    from hvdtrain.keras.backends.chosen import BACKEND

    asked: list[tuple[object, ...]] = []
    with ExitStack() as stack:
        if keras.backend.backend() == "torch":
            import torch

            stack.enter_context(mock.patch.object(torch.cuda, "set_device", lambda *what: asked.append(what)))
        else:
            from tensorflow import config

            gpus = {"list_physical_devices": lambda kind: [f"{kind} {number}" for number in range(4)]}
            gpus["set_visible_devices"] = lambda *what: asked.append(what)
            stack.enter_context(mock.patch.multiple(config, **gpus))
            grow = mock.patch.object(config.experimental, "set_memory_growth", lambda *what: asked.append(what))
            stack.enter_context(grow)
        BACKEND.pin([2], cpu_only=False)
    return asked


if __name__ == "__main__":
    world = hvdtrain.init("keras", seed=3)
    import hvdtrain.keras as hvk

    its_own = [(2,)] if keras.backend.backend() == "torch" else [(["GPU 2"], "GPU"), ("GPU 2", True)]
    assert asked_of_gpus() == its_own, asked_of_gpus()

    plain, model = train(False), train(True)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(weights_of(plain), weights_of(model), strict=True))
    assert "apply" not in vars(model.optimizer) and "train_step" not in vars(model)
    assert str(hvk.verify(model)) == "averaging: nothing to prove, 1 rank"

    x, y = np.arange(20.0).reshape(20, 1), np.arange(20)
    seen: list[list[int]] = []

    class Look(keras.Model):
        def call(self, x: object) -> object:
            return x

        def train_step(self, data: tuple) -> dict:
            if "torch" not in keras.backend.backend():
                import tensorflow as tf

                tf.py_function(lambda t: seen.append(t.numpy().tolist()), [data[1]], [])
            else:
                seen.append(data[1].tolist())
            return {"loss": 0.0}

    look = Look()
    look.compile("sgd", run_eagerly=True)
    data = hvk.loader((x, y), 8, seed=1)
    hvk.prepare(look)
    look.fit(data, epochs=2, verbose=0, callbacks=hvk.callbacks(look))  # fit shuffles by default: not ours
    expected = [share.indices.tolist() for epoch in (0, 1) for share in data.plan.step_slices(epoch, rank=0)]
    assert seen == expected, (seen, expected)

    forms: list[type] = []

    class OfX(Look):
        def train_step(self, data: object) -> dict:
            forms.append(type(data))
            return {"loss": 0.0}

        test_step = train_step

    of_x = OfX()
    of_x.compile("sgd", run_eagerly=True)
    hvk.prepare(of_x)
    of_x.fit(hvk.loader(x, 8), verbose=0, callbacks=hvk.callbacks(of_x))
    hvk.evaluate(of_x, x, per_rank_batch=8)
    assert len(forms) == 6 and tuple not in forms, forms

    def another_fit(*_: object) -> None:
        before, other = len(seen), Look()
        other.compile("sgd", run_eagerly=True)
        hvk.prepare(other)
        other.fit(hvk.loader((x, y), 8), verbose=0, callbacks=hvk.callbacks(other))
        del seen[before:]

    seen.clear()
    between = keras.callbacks.LambdaCallback(on_epoch_begin=another_fit)
    look.fit(data, epochs=4, initial_epoch=3, verbose=0, callbacks=[*hvk.callbacks(look), between])
    assert seen == [share.indices.tolist() for share in data.plan.step_slices(3, rank=0)]

    rest = hvk.loader((x, y), 8, seed=1)
    rest.go_on(1, 8)
    assert len(rest) == 2
    seen.clear()
    look.fit(rest, epochs=3, initial_epoch=1, verbose=0, callbacks=hvk.callbacks(look))
    left = [*data.plan.step_slices(1, 8, rank=0), *data.plan.step_slices(2, rank=0)]
    assert seen == [share.indices.tolist() for share in left], seen
    for slow, kind in (("input", "input bound: "), ("train_step", "compute bound: "), ("other", "")):
        verdict, shares = verdict_of(slow)
        assert shares[slow] == max(shares.values()), (slow, verdict, shares)
        busy = slow != "input" and shares["input"] >= INPUT_SHARE  # with other work: threads that read wait for a core
        assert verdict.startswith(kind) or busy, (verdict, shares)  # of other code that makes the rest unsure
    refused_where_ranks_change()
    world.comm.shutdown()
    print("all of it")
