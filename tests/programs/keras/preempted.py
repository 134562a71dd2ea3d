"""Trains, and is preempted within an epoch: preempted.py FOLDER [BATCH ["lost"]]

"lost": the checkpoint that was to be written in the four batches before; its process is stopped, and killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import keras
import numpy as np
from writing import writer

import hvdtrain
from hvdtrain.watch import preemption

world = hvdtrain.init("keras", seed=3)
import hvdtrain.keras as hvk  # noqa: E402

folder, *rest = sys.argv[1:]
batch, lost = int(rest[0]) if rest else 0, "lost" in rest


class Tells(keras.callbacks.Callback):
    """Rank 1 is told before one of its batches."""

    seen = 0

    def on_train_batch_begin(self, number: int, logs: Any = None) -> None:
        self.seen += 1
        if lost and world.is_main and self.seen in (batch - 4, batch - 1):
            (writer().suspend if self.seen == batch - 4 else writer().kill)()
        if self.seen == batch and world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + 30
            while not preemption.is_preempted() and time.monotonic() < deadline:
                time.sleep(0.001)


x = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
layers = [keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
model = keras.Sequential(layers)
model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
data = hvk.loader((x, x.sum(1, keepdims=True)), 4)  # 2 ranks: 7 batches and a half
hvk.prepare(model, data)
checkpoints = hvdtrain.Checkpointer(folder, best=None, keep=20)
progress = checkpoints.restore(hvk.model_state(model))
ours = hvk.callbacks(model, checkpointer=checkpoints)
first = progress.epoch if progress else 0
history = model.fit(data, epochs=3, initial_epoch=first, callbacks=[*ours, Tells()], verbose=0)
assert history.epoch == list(range(first, 3)) and len(history.history["loss"]) == 3 - first
print("trained", hvk.fingerprint(model), flush=True)
