"""Fits a small Keras model on 37 samples in float64: `plain` without hvdtrain, `ranks` with it; prints its weights."""

import json
import sys

import keras
import numpy as np

keras.config.set_floatx("float64")
keras.utils.set_random_seed(7)
x = np.random.default_rng(7).normal(size=(37, 5))
y = (x.sum(1) > 0).astype("int64")
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])
model.set_weights([np.random.default_rng(n).normal(size=w.shape) for n, w in enumerate(model.get_weights())])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss=loss)
main = True
if sys.argv[1] == "plain":
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
else:
    import hvdtrain
    import hvdtrain.keras as hvk

    world = hvdtrain.init("keras")
    data = hvk.loader((x, y), per_rank_batch=8 // world.size, shuffle=False)
    hvk.prepare(model, data)
    model.fit(data, epochs=2, verbose=0, callbacks=hvk.callbacks(model))
    main = world.is_main
if main:
    print("weights", json.dumps([w.tolist() for w in model.get_weights()]), flush=True)
