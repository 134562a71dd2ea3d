"""A Keras fit that goes on: docs/how-resume.md."""

import keras
import numpy as np

import hvdtrain
import hvdtrain.keras as hvk

hvdtrain.init("keras")
x = np.random.default_rng(0).normal(size=(64, 4))
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
data = hvk.loader((x, x.sum(axis=1)), per_rank_batch=16)
hvk.prepare(model, data, lr=hvdtrain.LR(base=0.1, reference_batch=16))
# the page
assert progress is None, "nothing to go on with"
again = checkpoints.restore(hvk.model_state(model))
assert again.epoch == 10 and again.samples_seen == 640, again
