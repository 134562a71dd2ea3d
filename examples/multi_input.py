"""Pictures and words in, a class and a number out, read by a PyDataset: Keras. "# +": added by hvdtrain.

    horovodrun -np 2 python examples/multi_input.py

A rank reads its own batches of the data set only. Its `workers` are threads, as ever.
"""

import keras
import numpy as np

import hvdtrain  # +
import hvdtrain.keras as hvk  # +

EPOCHS, BATCH = 2, 32

world = hvdtrain.init("keras")  # +
keras.utils.set_random_seed(0)


class Pairs(keras.utils.PyDataset):
    """Made up here; in earnest the files of a batch would be opened in __getitem__."""

    def __init__(self, samples, batch, **options):
        super().__init__(**options)
        self.samples, self.batch = samples, batch

    def __len__(self):
        return -(-self.samples // self.batch)

    def __getitem__(self, index):
        numbers = np.arange(index * self.batch, min((index + 1) * self.batch, self.samples))
        pictures = np.stack([np.random.default_rng(n).random((8, 8, 1)) for n in numbers])
        words = np.stack([np.random.default_rng(n).integers(1, 30, 6) * (np.arange(6) < 2 + n % 5) for n in numbers])
        kinds = (words[:, 0] + (pictures[:, 0, 0, 0] * 10).astype(int)) % 3
        return {"picture": pictures, "words": words}, {"kind": kinds, "light": pictures.mean((1, 2))}


picture, words = keras.Input((8, 8, 1), name="picture"), keras.Input((6,), name="words", dtype="int64")
seen = keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(8, 3, activation="relu")(picture))
read = keras.layers.GRU(8)(keras.layers.Embedding(30, 8, mask_zero=True)(words))
both = keras.layers.Dense(16, activation="relu")(keras.layers.concatenate([seen, read]))
kind, light = keras.layers.Dense(3, name="kind")(both), keras.layers.Dense(1, name="light")(both)
model = keras.Model({"picture": picture, "words": words}, {"kind": kind, "light": light})
losses = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "light": "mse"}
model.compile(keras.optimizers.Adam(1e-3), loss=losses, loss_weights={"kind": 1.0, "light": 0.5})

train = Pairs(300, BATCH // world.size)  # + instead of: train = Pairs(300, BATCH)
data = hvk.loader(train, shuffle=False)  # +
hvk.prepare(model, data)  # +
callbacks = hvk.callbacks(model)  # +
model.fit(data, epochs=EPOCHS, callbacks=callbacks)  # + instead of: model.fit(train, epochs=EPOCHS, shuffle=False)
