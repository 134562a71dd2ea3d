"""Rank 0's model file is loaded by hvd.load_model and trained on, with gradients aggregated over two batches."""

import os
import tempfile

import horovod.tensorflow.keras as hvd
import keras
import numpy as np


def build():
    return keras.Sequential([keras.Input((10,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])


hvd.init()
keras.utils.set_random_seed(11)
rng = np.random.default_rng(11)
x = rng.normal(size=(192, 10)).astype("float32")
y = np.sin(x[:, :1]).astype("float32")
shard = slice(hvd.rank(), None, hvd.size())

model = build()
optimizer = keras.optimizers.SGD(0.01 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2, average_aggregated_gradients=True)
model.compile(optimizer=optimizer, loss="mse")
start = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(x[shard], y[shard], batch_size=12, epochs=1, shuffle=False, callbacks=start, verbose=0)

with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "model.keras")
    model.save(path)  # each rank on its own disk
    model = hvd.load_model(path)

callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
history = model.fit(
    x[shard], y[shard], batch_size=12, epochs=2, initial_epoch=1, shuffle=False, callbacks=callbacks, verbose=0
)
if hvd.rank() == 0:
    print(f"final loss {history.history['loss'][-1]:.6f}")
