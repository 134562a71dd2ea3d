"""A table with numbers, categories and rare positives: Keras, tf.data and class weights. "# +": added by hvdtrain.

    horovodrun -np 2 python examples/tabular.py

In each step a rank has a batch of the data set; two ranks with batches of 32 train as one process with batches of 64.
"""

import keras
import numpy as np
import tensorflow as tf

import hvdtrain  # +
import hvdtrain.keras as hvk  # +

EPOCHS, BATCH = 3, 64
RARE = {0: 1.0, 1: 8.0}

world = hvdtrain.init("keras")  # +
keras.utils.set_random_seed(0)
draw = np.random.default_rng(0)
numbers = draw.normal(size=(1000, 6)) * [1, 2, 5, 10, 50, 100]
cities = draw.integers(20, size=1000)
bought = (numbers[:, 0] + numbers[:, 5] / 100 + cities / 10 > 3).astype("int64")

scale = keras.layers.Normalization()
scale.adapt(numbers)
columns = {"numbers": keras.Input((6,), name="numbers"), "city": keras.Input((), name="city", dtype="int64")}
both = keras.layers.concatenate([scale(columns["numbers"]), keras.layers.Embedding(20, 4)(columns["city"])])
hidden = keras.layers.Dense(32, activation="relu")(both)
model = keras.Model(columns, keras.layers.Dense(1, activation="sigmoid")(hidden))
model.compile(keras.optimizers.Adam(3e-3), loss="binary_crossentropy", metrics=["accuracy", "auc"])

table = tf.data.Dataset.from_tensor_slices(({"numbers": numbers, "city": cities}, bought[:, None]))
train = table.take(900).batch(BATCH // world.size)  # + instead of: train = table.take(900).batch(BATCH)
held_out = table.skip(900).batch(20)
data = hvk.loader(train, class_weight=RARE)  # +
hvk.prepare(model, data)  # +

callbacks = hvk.callbacks(model)  # +
model.fit(data, epochs=EPOCHS, callbacks=callbacks)  # + instead of: model.fit(train, epochs=EPOCHS, class_weight=RARE)
scores = hvk.evaluate(model, held_out)  # + instead of: scores = model.evaluate(held_out, return_dict=True)
if world.is_main:  # + instead of: if True:
    print(scores)
