"""Mixed precision in Keras: docs/how-mixed-precision.md."""

import keras
import numpy as np

import hvdtrain
import hvdtrain.keras as hvk

hvdtrain.init("keras")
x = np.random.default_rng(0).normal(size=(32, 4))
data = hvk.loader((x, x.sum(axis=1)), per_rank_batch=16)


def build_model():
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])


# the page
assert model.compute_dtype == "float16" and "LossScale" in type(model.optimizer).__name__
model.fit(data, epochs=1, callbacks=hvk.callbacks(model), verbose=0)
