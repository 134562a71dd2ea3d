"""A model with a train_step of its own, whose optimizer is wrapped: an autoencoder with two losses."""

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from tensorflow import keras


class Autoencoder(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.layers.Dense(6, activation="tanh")
        self.decoder = keras.layers.Dense(18)
        self.total = keras.metrics.Mean(name="loss")

    def call(self, x):
        return self.decoder(self.encoder(x))

    @property
    def metrics(self):
        return [self.total]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            code = self.encoder(data)
            loss = tf.reduce_mean((self.decoder(code) - data) ** 2) + 0.01 * tf.reduce_mean(tf.abs(code))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.total.update_state(loss)
        return {"loss": self.total.result()}


def main():
    hvd.init()
    keras.utils.set_random_seed(3)
    x = np.random.default_rng(3).normal(size=(192, 18)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices(x).shard(hvd.size(), hvd.rank()).batch(16)
    model = Autoencoder()
    model.build((None, 18))
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.RMSprop(1e-3 * hvd.size())))
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    history = model.fit(dataset, epochs=2, callbacks=callbacks, verbose=0)
    if hvd.rank() == 0:
        print(f"final loss {history.history['loss'][-1]:.6f}")
    return model


if __name__ == "__main__":
    model = main()
