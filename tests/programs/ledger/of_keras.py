"""The histories of the Keras adapter, on either backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import forked
import keras
import numpy as np
from forked import Job
from ledger import BASE, EPSILON, MOMENTUM, REFERENCE, SECOND, History, cut, first_weights, order_of, rows_of, uneven

import hvdtrain

keras.config.set_floatx("float64")
if keras.backend.backend() == "torch":
    import horovod.torch
else:
    import horovod.tensorflow  # noqa: F401
import hvdtrain.keras as hvk  # noqa: E402


class Batched(keras.utils.PyDataset):
    """Batches by index; shuffles its samples by numpy's generator at an epoch's end, or its beginning, if it does."""

    def __init__(self, samples: int, rows: int, shuffles: str) -> None:
        super().__init__()
        self._order, self._rows, self._shuffles = np.arange(samples), rows, shuffles

    def __len__(self) -> int:
        return -(-len(self._order) // self._rows)

    def __getitem__(self, index: int) -> Any:
        return rows_of(cut(self._order, self._rows)[index])

    def on_epoch_begin(self) -> None:
        if self._shuffles == "begun_order":
            np.random.shuffle(self._order)

    def on_epoch_end(self) -> None:
        if self._shuffles == "own_order":
            np.random.shuffle(self._order)


def loader(of: History, batch: int) -> Any:
    options: dict[str, Any] = {"tail": of.tail, "seed": abs(of.number)}
    x, y = rows_of(range(of.samples))
    match of.kind:
        case "arrays":
            return hvk.loader((x, y), batch, **options)
        case "in_order" | "dealt" | "own_order" | "begun_order":
            return hvk.loader(Batched(of.samples, batch, of.kind), shuffle=of.kind == "dealt", **options)
        case "generator":

            def begun(epoch: int) -> Iterator[Any]:
                yield from map(rows_of, uneven(order_of(of.samples, epoch), batch))

            return hvk.loader(begun, **options)
        case "tfdata":
            import tensorflow as tf

            def of_epoch(epoch: int) -> Any:
                whole = tf.data.Dataset.from_tensor_slices((x, y))
                return whole.shuffle(of.samples, seed=epoch, reshuffle_each_iteration=False).batch(batch)

            return hvk.loader(of_epoch, **options)
    import torch
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset

    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(list(zip(x, y, strict=True)))

    whole = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    if of.kind == "dataloader":
        return hvk.loader(DataLoader(whole, batch_size=batch, shuffle=True), **options)
    return hvk.loader(whole if of.kind == "dataset" else Stream(), batch, **options)


def dense(units: int, **arguments: Any) -> keras.layers.Layer:
    """Keras on torch rounds `matmul` to float32, and not `einsum`."""
    return keras.layers.EinsumDense("bi,ij->bj", output_shape=units, bias_axes="j", **arguments)


class SquaredError(keras.losses.MeanSquaredError):
    """In the model's precision: Keras on torch rounds every mean loss to float32."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        values = keras.ops.square(y_pred - keras.ops.convert_to_tensor(y_true))[:, 0]
        if sample_weight is not None:
            values = values * keras.ops.cast(sample_weight, values.dtype)
        return keras.ops.sum(values) / values.shape[0]


class Net(keras.Model):
    """Notes the samples of each step that is in its weights."""

    job: Job
    data: Any
    step = epoch = number = 0

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = dense(4, activation="tanh"), dense(1)

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x[:, 1:]))

    def train_step(self, data: Any) -> Any:
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        live = any(step.number == self.number for step, _ in self.data.served)  # others keep the ranks in step
        self.number += 1
        self.job.batches = [[int(i) for i in keras.ops.convert_to_numpy(x)[:, 0]] if live else []]
        self.job.at("gathered")
        rate = float(keras.ops.convert_to_numpy(self.optimizer.learning_rate))
        logs = super().train_step(data)
        self.step += 1
        self.job.note(self.step, self.epoch, rate)
        self.job.at("updated")
        return logs


class Noted(keras.callbacks.Callback):
    """Tells the model the epoch, and ends a life between two steps."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job, self._epochs = job, 0
        self.left = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.epoch, self.model.number = epoch, 0
        self._epochs += 1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            self._job.at("began", self._epochs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._job.at("saved")
        if self._job.at("left"):
            self.left = self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._job.at("ended", self._epochs)


def compiled(of: History, job: Job) -> keras.Model:
    model = Net()
    model.job = job
    model(rows_of([0])[0])
    model.set_weights(first_weights())
    passes = of.accumulate if of.accumulate > 1 else None
    if of.optimizer == "sgd":
        optimizer = keras.optimizers.SGD(BASE, momentum=MOMENTUM, gradient_accumulation_steps=passes)
    else:
        optimizer = keras.optimizers.Adam(
            BASE, beta_1=MOMENTUM, beta_2=SECOND, epsilon=EPSILON, gradient_accumulation_steps=passes
        )
    model.compile(optimizer, SquaredError(), run_eagerly=True)
    return model


def train(job: Job) -> None:
    of, life = job.history, job.life
    world = hvdtrain.init("keras", seed=1, engine="auto" if life.size > 1 else "solo")
    with world:
        data = loader(of, life.batch)
        model = compiled(of, job)
        total = of.samples * of.epochs
        schedule: dict[str, Any] = {"schedule": "cosine", "total_samples": total} if of.decays else {}
        lr = hvdtrain.LR(BASE, REFERENCE, scale="sqrt", warmup_samples=of.samples // 2, **schedule)
        hvk.prepare(model, data, lr=lr)
        checkpoints = hvdtrain.Checkpointer(job.folder / "checkpoints", best=None, keep=2, asynchronous=life.writes)
        progress = checkpoints.restore(hvk.model_state(model)) or hvdtrain.Progress()
        model.step, model.data = progress.step, data
        job.begins(world, progress.step, data.global_batch, data.unit if data.unit > 1 else 0)
        ours = hvk.callbacks(model, checkpointer=checkpoints, save_every=life.every)
        noted = Noted(job)
        if progress.epoch < of.epochs:
            model.fit(data, epochs=of.epochs, initial_epoch=progress.epoch, verbose=0, callbacks=[*ours, noted])
        if not noted.left:
            job.ends(world, model.get_weights())


if __name__ == "__main__":
    forked.main(train)
