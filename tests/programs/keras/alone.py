"""What one process without Horovod can show: equality with plain Keras, and the data's order."""

from __future__ import annotations

from common import block, cnn, images, loss, weights_of

block("horovod")

import keras  # noqa: E402
import numpy as np  # noqa: E402

import hvdtrain  # noqa: E402


def train(prepared: bool) -> keras.Model:
    keras.utils.set_random_seed(4)
    model = cnn()
    model.add(keras.layers.Dropout(0.5))
    model.compile(keras.optimizers.Adam(1e-2), loss(), metrics=["accuracy"])
    callbacks = hvk.callbacks(hvk.prepare(model)) if prepared else []
    x, y = images(64)
    model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=callbacks)
    return model


if __name__ == "__main__":
    world = hvdtrain.init("keras", seed=3)
    import hvdtrain.keras as hvk

    plain, model = train(False), train(True)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(weights_of(plain), weights_of(model), strict=True))
    print("bit-equal to plain Keras (with dropout)")
    assert "apply" not in vars(model.optimizer) and "train_step" not in vars(model)
    assert str(hvk.verify(model)) == "averaging: nothing to prove, 1 rank"
    print("nothing hooked")

    x, y = np.arange(20.0).reshape(20, 1), np.arange(20)
    seen: list[list[int]] = []

    class Look(keras.Model):
        def call(self, x: object) -> object:
            return x

        def train_step(self, data: tuple) -> dict:
            if "torch" not in keras.backend.backend():
                import tensorflow as tf

                tf.py_function(lambda t: seen.append(t.numpy().tolist()), [data[1]], [])
            else:
                seen.append(data[1].tolist())
            return {"loss": 0.0}

    look = Look()
    look.compile("sgd", run_eagerly=True)
    data = hvk.loader((x, y), 8, seed=1)
    look.fit(data, epochs=2, verbose=0, callbacks=hvk.callbacks(hvk.prepare(look)))  # fit shuffles by default: not ours
    expected = [share.indices.tolist() for epoch in (0, 1) for share in data.plan.step_slices(epoch, rank=0)]
    assert seen == expected, (seen, expected)
    print("order fixed")

    seen.clear()
    look.fit(data, epochs=4, initial_epoch=3, verbose=0, callbacks=hvk.callbacks(look))
    assert seen == [share.indices.tolist() for share in data.plan.step_slices(3, rank=0)]
    print("epochs told apart")

    rest = hvk.loader((x, y), 8, seed=1)
    rest.go_on(1, 8)
    assert len(rest) == 2
    try:
        look.fit(rest, epochs=3, initial_epoch=1, verbose=0, callbacks=hvk.callbacks(look))
        raise SystemExit("a partial epoch was followed by another")
    except hvdtrain.ConfigError as error:
        assert "rest of one epoch" in str(error)
    print("partial epoch refused")
    world.comm.shutdown()
