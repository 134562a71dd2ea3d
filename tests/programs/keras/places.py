"""Where `fit` begins, and what it leaves behind, in one process. Usage: places.py FOLDER; prints a JSON object."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvdtrain
import hvdtrain.keras as hvk
from hvdtrain.keras.backends.session import session_of
from hvdtrain.record.bottleneck import phases_per_rank
from hvdtrain.record.log import read_events

FOLDER = Path(sys.argv[1])
X, Y = np.arange(24.0).reshape(24, 1), np.arange(24.0).reshape(24, 1)


class Seen(keras.Model):
    """Remembers the samples of each batch it trains and validates on."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.trained: list[float] = []
        self.validated: list[float] = []

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        self.trained += np.ravel(data[0]).tolist()
        return super().train_step(data)

    def test_step(self, data: Any) -> Any:
        self.validated += np.ravel(data[0]).tolist()
        return super().test_step(data)


def model() -> Seen:
    made = Seen()
    made.compile(keras.optimizers.SGD(1e-4), "mse", run_eagerly=True)
    made(X[:1])
    return made


def data(**options: Any) -> Any:
    return hvk.loader((X, Y), 8, **options)


def refused(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except hvdtrain.ConfigError as error:
        return str(error)
    return "not refused"


def saved_within_epoch_1() -> tuple[Any, list[float]]:
    """Returns a model restored after one batch of epoch 1 of 3, with its loader, and what was not yet trained on."""
    checkpoints = hvdtrain.Checkpointer(FOLDER / f"c{time.monotonic_ns()}", keep=9)
    first, its = model(), data()
    hvk.prepare(first, its)
    stop = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    first.fit(its, epochs=2, verbose=0, callbacks=[*hvk.callbacks(first, checkpointer=checkpoints, save_every=1), stop])
    second, its = model(), data()
    hvk.prepare(second, its)
    within = next(c for c in checkpoints.list() if c.progress.samples_in_epoch == 8 and c.progress.epoch == 1)
    checkpoints.restore(hvk.model_state(second), which=within.path)
    return (second, its), first.trained[-16:]


def main() -> dict[str, Any]:
    found: dict[str, Any] = {}
    (resumed, its), rest = saved_within_epoch_1()
    resumed.fit(its, validation_data=its, epochs=2, initial_epoch=1, verbose=0, callbacks=hvk.callbacks(resumed))
    found["validates on its training data"] = [resumed.trained == rest, sorted(resumed.validated) == X.ravel().tolist()]
    resumed.trained.clear()
    resumed.fit(its, epochs=2, initial_epoch=1, verbose=0, callbacks=hvk.callbacks(resumed))
    found["fits it again"] = sorted(resumed.trained) == X.ravel().tolist()

    (plain, its), rest = saved_within_epoch_1()
    plain.fit(its, epochs=2, initial_epoch=1, verbose=0)
    plain.fit(its, epochs=3, initial_epoch=2, verbose=0)
    found["without callbacks"] = [plain.trained[:16] == rest, len(plain.trained)]
    other = model()
    hvk.prepare(other, its)
    other.fit(its, epochs=1, verbose=0, callbacks=hvk.callbacks(other))
    found["another model"] = len(other.trained)

    (again, its), _ = saved_within_epoch_1()
    found["another training"] = refused(again.fit, data(), epochs=1, verbose=0)
    checkpoints = hvdtrain.Checkpointer(FOLDER / "anew")
    checkpoints.save(hvk.model_state(again), progress=hvdtrain.Progress(1, 3, 24, 0))
    anew, its = model(), data()
    hvk.prepare(anew, its)
    state = hvk.model_state(anew)
    checkpoints.restore({"model.keras": state["model.keras"]})
    anew.fit(its, epochs=1, verbose=0, callbacks=hvk.callbacks(anew))
    found["its remedy"] = len(anew.trained)

    def validated(first: int) -> list[float]:
        one, its = model(), data()
        hvk.prepare(one, its)
        one.fit(
            its, validation_data=data(seed=5), initial_epoch=first, epochs=3, verbose=0, callbacks=hvk.callbacks(one)
        )
        return one.validated[-24:]

    found["validation's order"] = validated(0) == validated(2)

    one, its = model(), data()
    hvk.prepare(one, its)
    history: Any

    def look(batch: int, logs: Any) -> None:
        if batch > 5:
            print(history)

    history = one.fit(its, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=look)])
    found["evaluate"] = refused(hvk.evaluate, one, its, per_rank_batch=4)
    found["data is let go"] = session_of(one).fit.data is None

    one, its = model(), data()
    hvk.prepare(one, its)
    with hvdtrain.RunLog(FOLDER / "run", WORLD, config={}, progress=False, tensorboard=False) as run:
        checkpoints = hvdtrain.Checkpointer(FOLDER / "run" / "checkpoints")
        ours = hvk.callbacks(one, run=run, checkpointer=checkpoints)
        one.fit(its, validation_data=data(), epochs=1, verbose=0, callbacks=ours)
    (phases,) = phases_per_rank(read_events(FOLDER / "run"))
    found["phases"] = [phases.get(name, 0.0) > 0 for name in ("evaluation", "checkpoint")]
    return found


WORLD = hvdtrain.init("keras", engine="solo")
if __name__ == "__main__":
    print(json.dumps(main()))
