"""Watches a script on Keras over TensorFlow for a proof: its models and batches; makes random streams equal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")  # this module is of no other

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from hvdtrain.core.generators import Generators, TensorFlowSeeds
from hvdtrain.guard.hooks import wrap
from hvdtrain.migrate.rank import Enough, seed
from hvdtrain.private.keras import GLOBAL_RANDOM_SEED, CallbackList, global_state

_SEEDS = ("global_seed_generator", GLOBAL_RANDOM_SEED)


class KerasScriptWatch:
    """Counts the batches that models are trained on, and knows the models.

    Attributes:
        updates: batches of `fit` and `train_on_batch`; with accumulation several of them are an update.
        start: the tensors of the models before the first of them.
    """

    def __init__(self, limit: int, *, wraps: bool) -> None:
        self._limit, self._first = limit, 0
        self._models: list[Any] = []
        self.updates, self.start = 0, dict[str, np.ndarray]()
        keras.utils.set_random_seed(seed())
        _alike_in_hvdtrain()
        wrap(CallbackList, "on_train_batch_begin", self._begins)
        wrap(CallbackList, "on_train_batch_end", self._ends)
        wrap(keras.Model, "train_on_batch", self._alone)

    def _begins(self, original: Callable[..., Any], callbacks: Any, batch: int, *args: Any, **kwargs: Any) -> None:
        self._first = batch
        self._know(callbacks.model)
        original(callbacks, batch, *args, **kwargs)

    def _ends(self, original: Callable[..., Any], callbacks: Any, batch: int, *args: Any, **kwargs: Any) -> None:
        original(callbacks, batch, *args, **kwargs)
        self._count(batch + 1 - self._first)  # several, with steps_per_execution

    def _alone(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        self._know(model)
        found = original(model, *args, **kwargs)
        self._count(1)
        return found

    def _know(self, model: Any) -> None:
        if not any(known is model for known in self._models):
            self._models.append(model)
        if not self.start:
            self.start = self.tensors()[0]

    def _count(self, updates: int) -> None:
        self.updates += updates
        if self.updates >= self._limit:
            raise Enough

    def tensors(self) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Returns all weights of the models, in the order in which these were fitted."""
        arrays, eps = {}, {}
        for number, model in enumerate(self._models, 1):
            for place, weight in enumerate(model.weights):
                kind = tf.as_dtype(weight.dtype)
                value = tf.cast(weight.value, tf.float32) if kind.is_floating and kind.size < 4 else weight.value
                key = f"{type(model).__name__} {number}: {place} {weight.name}"
                arrays[key] = np.array(value)
                eps[key] = float(np.finfo((kind if kind.is_floating else tf.float64).as_numpy_dtype).eps)
        return arrays, eps

    def rank(self) -> int:
        return int(hvd.rank())

    def end(self) -> None:
        hvd.allreduce(tf.constant(0.0), name="hvdtrain.migrate.end")
        hvd.shutdown()


@contextmanager
def _kept_streams() -> Iterator[None]:
    """Restores the random streams at its end."""
    seeds = [global_state.get_global_attribute(name) for name in _SEEDS]
    try:
        with Generators([TensorFlowSeeds(context.context())]).preserved():
            yield
    finally:
        for name, value in zip(_SEEDS, seeds, strict=True):
            global_state.set_global_attribute(name, value)


def _alike_in_hvdtrain() -> None:
    """Undoes hvdtrain's seeding: it gives each rank another stream of random numbers."""
    import hvdtrain
    import hvdtrain.keras
    from hvdtrain.keras.state import rng, start

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _kept_streams():
            return original(*args, **kwargs)

    wrap(hvdtrain, "init", around)
    wrap(hvdtrain.keras, "prepare", around)
    wrap(start, "start", around)
    wrap(rng, "split_streams", lambda original, model, world: None)
