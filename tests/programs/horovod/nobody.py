"""Horovod's names for one process that stands for several ranks: sizes and rates are theirs, and nothing is sent."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any


def install(size: int, together: bool) -> None:
    """From now on, `import horovod.torch` and the like give this.

    Args:
        together: whether the process has the samples of all ranks, not of rank 0 alone.
    """
    hvd = Nobody("horovod")
    vars(hvd).update(init=lambda: None, size=lambda: size, local_size=lambda: size, nccl_built=lambda: False)
    vars(hvd).update(rank=lambda: 0, local_rank=lambda: 0, Average=1, Sum=2, Adasum=3)
    vars(hvd).update(Compression=SimpleNamespace(none=None, fp16=None))
    vars(hvd).update(
        allreduce=lambda value, **_: value,
        broadcast=lambda value, *_, **__: value,
        broadcast_parameters=lambda *_, **__: None,
        broadcast_optimizer_state=lambda *_, **__: None,
        broadcast_variables=lambda *_, **__: None,
        DistributedOptimizer=lambda optimizer, **_: optimizer,
        DistributedGradientTape=lambda tape, **_: tape,
    )
    hvd.elastic = SimpleNamespace(  # type: ignore[attr-defined]
        run=lambda function: function,
        TorchState=lambda model, optimizer, **given: _State(model=model, optimizer=optimizer, **given),
        TensorFlowKerasState=lambda model, optimizer, **given: _State(model=model, optimizer=optimizer, **given),
        ElasticSampler=lambda dataset: _Sampler(len(dataset), 1 if together else size),
        KerasState=lambda model, **given: _State(model=model, **given),
        UpdateEpochStateCallback=lambda *_, **__: _callbacks(size).Callback(),
        UpdateBatchStateCallback=lambda *_, **__: _callbacks(size).Callback(),
        CommitStateCallback=lambda *_, **__: _callbacks(size).Callback(),
    )
    for name in ("", ".torch", ".keras", ".tensorflow", ".tensorflow.keras"):
        sys.modules["horovod" + name] = hvd
    vars(hvd).update(torch=hvd, keras=hvd, tensorflow=hvd)


class Nobody(ModuleType):
    @property
    def callbacks(self) -> Any:  # asked for by scripts that have imported Keras
        return _callbacks(self.size())


class _Sampler:
    """Horovod's order of the samples in an epoch, if no rank comes or goes."""

    def __init__(self, samples: int, ranks: int) -> None:
        self._samples, self._ranks, self._epoch = samples, ranks, 0

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._samples))
        random.Random(self._epoch).shuffle(order)
        return iter(order[:: self._ranks])

    def __len__(self) -> int:
        return self._samples // self._ranks

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def record_batch(self, *_: int) -> None:
        pass


class _State(SimpleNamespace):
    def commit(self) -> None:
        pass

    check_host_updates = commit

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        pass


def _callbacks(size: int) -> Any:
    import tensorflow as tf

    base = tf.keras.callbacks.Callback

    class WarmUp(base):  # type: ignore[misc, valid-type]
        """From the rate of one rank to that of all, in equal steps over the first epochs."""

        def __init__(self, initial_lr: float, warmup_epochs: int, **_: Any) -> None:
            super().__init__()
            self._rate, self._epochs, self._epoch = initial_lr, warmup_epochs, 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self._epoch = epoch

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            done = self._epoch + (batch + 1) / self.params["steps"]
            if self._epoch < self._epochs:
                self.model.optimizer.learning_rate = self._rate * (1 / size + (1 - 1 / size) * done / self._epochs)

    return SimpleNamespace(
        Callback=base,
        BroadcastGlobalVariablesCallback=lambda *_, **__: base(),
        MetricAverageCallback=base,
        LearningRateScheduleCallback=lambda *_, **__: base(),  # no run comes to the epochs in which it acts
        LearningRateWarmupCallback=WarmUp,
    )
