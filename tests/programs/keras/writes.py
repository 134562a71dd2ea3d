"""Callbacks of Keras that write files, on every rank as a plain script has them: FOLDER; prints what they count."""

import sys
from pathlib import Path

import keras
import numpy as np

import hvdtrain
import hvdtrain.keras as hvk
from hvdtrain.core.errors import ConfigError

folder = Path(sys.argv[1])
world = hvdtrain.init("keras")
saved = []


class Mine(keras.callbacks.ModelCheckpoint):
    """A user's own."""

    def _save_model(self, epoch, batch, logs):
        super()._save_model(epoch, batch, logs)
        saved.append((epoch, round(float(self.best), 6)))


x = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
y = (x.sum(1) > 0).astype("int64")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(300, "relu"), keras.layers.Dense(2)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
data = hvk.loader((x, y), per_rank_batch=8)
hvk.prepare(model, data)
mine = [
    keras.callbacks.ModelCheckpoint(folder / f"rank{world.rank}-{{epoch}}.keras"),
    Mine(folder / f"mine{world.rank}.weights.h5", monitor="loss", save_best_only=True, save_weights_only=True),
    keras.callbacks.CSVLogger(folder / f"log{world.rank}.csv"),
]
if keras.backend.backend() == "tensorflow":  # it writes the graph, and what it shows of embeddings, before a fit begins
    mine.append(keras.callbacks.TensorBoard(folder / f"board{world.rank}", embeddings_freq=1))
for _ in range(2):  # the same callbacks again
    model.fit(data, epochs=2, verbose=0, callbacks=[*hvk.callbacks(model), *mine])
print("best", world.rank, saved, flush=True)
model.save(folder / f"own{world.rank}.keras")  # outside of fit: the user's own
try:
    model.fit(data, epochs=1, verbose=0, callbacks=[*hvk.callbacks(model), keras.callbacks.BackupAndRestore(folder)])
except ConfigError as error:
    print("refused", error.rule, flush=True)
