"""The documented Keras example: fit with Horovod's callbacks, a sharded tf.data set, checkpoints on rank 0."""

import os
import tempfile

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

hvd.init()
tf.keras.utils.set_random_seed(1)

rng = np.random.default_rng(5)
x = rng.normal(size=(256, 20)).astype("float32")
y = (x @ rng.normal(size=(20, 4))).argmax(1)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shard(hvd.size(), hvd.rank())
dataset = dataset.shuffle(128).batch(16, drop_remainder=True)

model = tf.keras.Sequential(
    [
        tf.keras.Input((20,)),
        tf.keras.layers.Dense(16, activation="relu"),
        tf.keras.layers.Dense(4),
    ]
)
# Horovod: adjust learning rate based on number of workers.
scaled_lr = 0.001 * hvd.size()
opt = tf.optimizers.Adam(scaled_lr)
# Horovod: add Horovod DistributedOptimizer.
opt = hvd.DistributedOptimizer(opt)
model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=opt,
    metrics=["accuracy"],
)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=1, verbose=0),
]
with tempfile.TemporaryDirectory() as folder:
    # Horovod: save checkpoints only on worker 0 to prevent other workers from corrupting them.
    if hvd.rank() == 0:
        callbacks.append(tf.keras.callbacks.ModelCheckpoint(os.path.join(folder, "checkpoint-{epoch}.keras")))
    history = model.fit(dataset, epochs=2, callbacks=callbacks, verbose=0)
if hvd.rank() == 0:
    print(f"final loss {history.history['loss'][-1]:.6f}")
