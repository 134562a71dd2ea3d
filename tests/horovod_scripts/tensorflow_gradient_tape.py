"""A loop of one's own with DistributedGradientTape; variables are broadcast after the first batch."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()
tf.random.set_seed(42)

rng = np.random.default_rng(0)
images = rng.normal(size=(256, 32)).astype("float32")
labels = (images @ rng.normal(size=(32, 10))).argmax(1)
dataset = tf.data.Dataset.from_tensor_slices((images, labels))
dataset = dataset.shard(hvd.size(), hvd.rank()).shuffle(128, seed=1).batch(16, drop_remainder=True).repeat()

mnist_model = tf.keras.Sequential(
    [
        tf.keras.Input((32,)),
        tf.keras.layers.Dense(24, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
loss = tf.losses.SparseCategoricalCrossentropy()
opt = tf.optimizers.Adam(0.001 * hvd.size())


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = mnist_model(images, training=True)
        loss_value = loss(labels, probs)
    # Horovod: add Horovod Distributed GradientTape.
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, mnist_model.trainable_variables)
    opt.apply_gradients(zip(grads, mnist_model.trainable_variables))
    # Horovod: broadcast initial variable states from rank 0 to all other processes, after the first step, so that
    # the optimizer's are there.
    if first_batch:
        hvd.broadcast_variables(mnist_model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)
    return loss_value


for batch, (x, y) in enumerate(dataset.take(16)):
    loss_value = training_step(x, y, batch == 0)

loss_value = hvd.allreduce(loss_value, name="loss")
if hvd.rank() == 0:
    print(f"final loss {float(loss_value):.6f}")
model = mnist_model
