"""Ranks come and go within `fit`: `elastic.py OUT EPOCHS UPDATES_PER_S [FORMATION.RANK:UPDATE:SPOT ...]`.

In that formation (*: any, once) that rank kills itself (SIGKILL) when so many updates are done, at a spot: "before"
the train function, "in" it (the others wait for its gradients), "after" it, in "validate", at the "end" of an epoch,
or at its "head". Each process leaves a ledger in OUT: what it took part in, and what was applied; rank 0 of the end
leaves the weights.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvdtrain
import hvdtrain.keras as hvk
from hvdtrain.comm import elastic

BETAS, EPSILON = (0.875, 0.9375), 2.0**-20  # which float32 holds: Keras casts to it
SLOW_S = 0.2  # an update takes while there are fewer ranks than at first: a new process takes seconds
SAMPLES, CLASSES, FEATURES, KINDS, HIDDEN, PER_RANK, BASE, DECAY = 150, 3, 6, 5, 8, 4, 0.05, 0.97
MIN_DELTA = 0.02  # of the loss: less is no improvement


def samples() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, labels and numbers."""
    draw = np.random.RandomState(1)
    x = draw.randn(SAMPLES, FEATURES)
    return x, (x @ draw.randn(FEATURES, CLASSES)).argmax(1), np.arange(SAMPLES)


def weights() -> list[np.ndarray]:
    """The model's first."""
    draw = np.random.RandomState(2)
    shapes = [(KINDS, FEATURES), (FEATURES, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,)]
    return [0.5 * draw.randn(*shape) for shape in shapes]


class Looks(keras.layers.Layer):
    """Passes on, and calls back when a step of training runs; not where the loss is tried in training mode."""

    then: Any = None

    def call(self, inputs: Any, training: bool = False) -> Any:
        x, ids = inputs
        if not training:
            return x
        if keras.backend.backend() == "torch":
            import torch

            if torch.is_grad_enabled():
                self.then(ids.numpy())
            return x
        import tensorflow as tf

        if not tf.inside_function():
            return x
        with tf.control_dependencies([tf.numpy_function(self.then, [ids], [])]):
            return tf.identity(x)


class Ledger(keras.callbacks.Callback):
    """What this process took part in; and when it kills itself."""

    def __init__(self, out: str, rate: float, todo: list[str], world: hvdtrain.World) -> None:
        super().__init__()
        self._path = Path(out, f"ledger.{os.getpid()}")
        self._todo, self._pause_s, self._world = {tuple(one.split(":")) for one in todo}, 1 / rate, world
        self._size = world.size  # which is that of the first ranks in a new process, too
        self.data: Any = None
        self.epoch = self.updates = self.epochs = 0

    def state_dict(self) -> dict[str, int]:
        return {"updates": self.updates, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.updates, self.epochs = state["updates"], state["epochs"]

    def _note(self, kind: str, step: int, ids: list[int]) -> None:
        line = elastic.line()
        formation = line.formation if line is not None else 0
        with self._path.open("a") as file:
            print(json.dumps([kind, self.epoch, step, formation, ids, time.time()]), file=file)

    def at(self, spot: str) -> None:
        line = elastic.line()
        for formation in (line.formation if line is not None else 0, "*"):
            entry = f"{formation}.{self._world.rank}", str(self.updates), spot
            once = self._path.with_name("killed." + ".".join(entry))
            if entry in self._todo and not once.exists():
                once.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def took(self, ids: np.ndarray) -> None:
        per_epoch = self.data.plan.steps()
        step = self.data.plan.step_slices(self.epoch, rank=self._world.rank)[self.updates - self.epoch * per_epoch]
        self._note("took", self.updates + 1, [] if step.padding else ids.tolist())
        self.at("in")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        self.epochs += 1
        self.at("head")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(self._pause_s if self._world.size == self._size else SLOW_S)
        self.at("before")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.updates += 1
        self._note("applied", self.updates, [])
        self.at("after")

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.at("validate")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.at("end")


def main() -> None:
    out, epochs, rate, *todo = sys.argv[1:]
    keras.config.set_floatx("float64")
    world = hvdtrain.init("keras", device="cpu")  # which the end of the program leaves
    with ExitStack() as stack:
        ledger = Ledger(out, float(rate), todo, world)
        x, y, ids = samples()
        ledger.data = data = hvk.loader(((x, ids), y), PER_RANK)
        held_out = hvk.loader(((x, ids), y), PER_RANK, shuffle=False)
        features, numbers = keras.Input((FEATURES,)), keras.Input((), dtype="int64")
        Looks.then = staticmethod(ledger.took)
        kinds = keras.layers.Embedding(KINDS, FEATURES)(keras.ops.mod(numbers, KINDS))  # whose gradients are sparse
        hidden = keras.layers.Dense(HIDDEN, activation="tanh")(Looks()([features, numbers]) + kinds)
        model = keras.Model([features, numbers], keras.layers.Dense(CLASSES)(hidden))
        model.set_weights(weights())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        adam = keras.optimizers.Adam(BASE, beta_1=BETAS[0], beta_2=BETAS[1], epsilon=EPSILON)
        model.compile(adam, loss, metrics=["accuracy"])
        hvk.prepare(model, data)
        log = stack.enter_context(hvdtrain.RunLog(f"{out}/run", world, config={}, tensorboard=False))
        ours = hvk.callbacks(model, run=log, checkpointer=hvdtrain.Checkpointer(f"{out}/checkpoints", keep=2))
        rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * DECAY if epoch else rate)
        waits = keras.callbacks.EarlyStopping("val_loss", min_delta=MIN_DELTA, patience=1000)
        history = model.fit(
            data, epochs=int(epochs), validation_data=held_out, callbacks=[*ours, rates, waits, ledger], verbose=0
        )
        found = hvk.evaluate(model, ((x, ids), y), per_rank_batch=8)
        own = (ledger.updates, ledger.epochs, history.epoch, history.history["val_loss"], waits.wait, waits.best)
        counted = world.gather(own)
        assert all(its == counted[0] for its in counted), counted
        if world.is_main:
            left = {"updates": ledger.updates, "validated": history.history["val_loss"], "loss": found["loss"],
                    "accuracy": history.history["val_accuracy"], "epochs": history.epoch, "begun": ledger.epochs,
                    "waited": waits.wait}  # fmt: skip
            Path(out, "final.json").write_text(json.dumps(left))
            np.savez(f"{out}/final.npz", *model.get_weights())


if __name__ == "__main__":
    main()
