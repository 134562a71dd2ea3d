"""A training step of Horovod's own tape that XLA compiles, on every rank: prints how far it is from one process's."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()
rank, size = hvd.rank(), hvd.size()
rng = np.random.default_rng(0)
x, y = rng.normal(size=(size * 6, 5)), rng.normal(size=(size * 6, 1))
weights = [tf.Variable(rng.normal(size=shape)) for shape in ((5, 4), (4,), (4, 1))]
expected = [weight.numpy() for weight in weights]


def loss_of(inputs, targets):
    w, b, v = weights
    return tf.reduce_mean((tf.tanh(inputs @ w + b) @ v - targets) ** 2)


@tf.function(jit_compile=True)
def step(inputs, targets):
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = loss_of(inputs, targets)
    for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
        weight.assign_sub(0.1 * gradient)
    return hvd.allreduce(loss, op=hvd.Average, name="loss")


mine = slice(rank * 6, rank * 6 + 6)
losses = [step(tf.constant(x[mine]), tf.constant(y[mine])).numpy() for _ in range(5)]
distributed = [weight.numpy() for weight in weights]
for weight, value in zip(weights, expected, strict=True):
    weight.assign(value)
for loss in losses:
    with tf.GradientTape() as tape:
        whole = loss_of(tf.constant(x), tf.constant(y))
    np.testing.assert_allclose(loss, whole.numpy(), rtol=0, atol=1e-10)
    for weight, gradient in zip(weights, tape.gradient(whole, weights), strict=True):
        weight.assign_sub(0.1 * gradient)
worst = max(np.abs(a - b.numpy()).max() for a, b in zip(distributed, weights, strict=True))
print(f"worst {worst:.1e} of {len(weights)} weights", flush=True)
