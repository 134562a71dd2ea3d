"""horovod.keras: each rank's own part of arrays, fit with warm-up and a schedule."""

import horovod.keras as hvd
import keras
import numpy as np

hvd.init()
keras.utils.set_random_seed(7)

rng = np.random.default_rng(7)
x = rng.normal(size=(240, 12)).astype("float32")
y = (x[:, :1] * x[:, 1:2]).astype("float32")
x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]

inputs = keras.Input((12,))
hidden = keras.layers.Dense(24, activation="tanh")(inputs)
model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
initial_lr = 0.01 * hvd.size()
opt = hvd.DistributedOptimizer(keras.optimizers.SGD(initial_lr), compression=hvd.Compression.fp16)
model.compile(optimizer=opt, loss="mse")
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=initial_lr, warmup_epochs=1),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=initial_lr, multiplier=0.1, start_epoch=1),
]
history = model.fit(x, y, batch_size=12, epochs=2, callbacks=callbacks, verbose=0)
score = hvd.allreduce(model.evaluate(x, y, verbose=0), name="score")
if hvd.rank() == 0:
    print(f"final loss {float(score):.6f}")
