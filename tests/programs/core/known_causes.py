"""Trains on two ranks, once for each known cause of lost time; rank 0 prints the verdicts as JSON.

Usage: known_causes.py keras|torch FOLDER. What is slow sleeps for many times the rest of a step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import hvdtrain

FRAMEWORK, FOLDER = sys.argv[1], Path(sys.argv[2])
CAUSES = (
    "slow disk", "slow augmentation", "straggler", "slow callbacks", "frequent saves", "evaluation heavy",
    "compute heavy", "tiny batches", "nothing stands out",
)  # fmt: skip
SLEEP_S, EPOCHS = 0.25, 2
X, Y = np.arange(192, dtype="float32").reshape(64, 3) / 192, np.arange(64, dtype="float32").reshape(64, 1) / 64


def sleeping(function: Callable[..., Any], *, when: bool = True) -> Callable[..., Any]:
    def slow(*args: Any, **kwargs: Any) -> Any:
        if when:
            time.sleep(SLEEP_S)
        return function(*args, **kwargs)

    return slow


class SlowDisk(hvdtrain.Checkpointer):
    """Training waits for its disk."""

    def save(self, *args: Any, **kwargs: Any) -> Any:
        path = super().save(*args, **kwargs)
        time.sleep(4 * SLEEP_S)
        return path


class Read:
    """Samples that are read one by one; so many of them make a batch."""

    def __init__(self, slow: bool) -> None:
        self.slow = slow

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        if self.slow:
            time.sleep(SLEEP_S / 8)
        return X[index], Y[index]


def with_keras(cause: str, world: Any, run: Any) -> None:
    import keras

    import hvdtrain.keras as hvk

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return len(X) // 8

        def __getitem__(self, index: int) -> Any:
            time.sleep(SLEEP_S)
            return X[8 * index :][:8], Y[8 * index :][:8]

    def augmented(epoch: int) -> Iterator[Any]:
        for begin in range(0, len(X), 8):
            time.sleep(SLEEP_S / 2)  # of each rank's batches, which every rank walks
            yield X[begin:][:8], Y[begin:][:8]

    class Model(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            if cause == "compute heavy":
                time.sleep(4 * SLEEP_S)
            return super().train_step(data)

    model = Model([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=cause == "compute heavy")
    data = {"slow disk": lambda: hvk.loader(Batches()), "slow augmentation": lambda: hvk.loader(augmented)}.get(
        cause, lambda: hvk.loader((X, Y), 8)
    )()
    hvk.prepare(model, data, verify=False)
    pauses = cause == "slow callbacks" or (cause == "straggler" and world.rank == 1)
    own = keras.callbacks.LambdaCallback(on_train_batch_end=sleeping(lambda *_, **__: None, when=pauses))
    saves = SlowDisk(run.path("checkpoints"), best=None) if cause == "frequent saves" else None
    model.fit(
        data,
        epochs=1 if cause == "nothing stands out" else EPOCHS,
        validation_data=hvk.loader(Batches(), shuffle=False) if cause == "evaluation heavy" else None,
        verbose=0,
        callbacks=[*hvk.callbacks(model, run=run, checkpointer=saves), own],
    )


def with_torch(cause: str, world: Any, run: Any) -> None:
    import torch

    import hvdtrain.torch as hvt
    from hvdtrain.torch.engines.horovod import HorovodModel

    batch = 1 if cause == "tiny batches" else 8
    model = torch.nn.Linear(3, 1)
    reads = {"slow disk": True, "slow augmentation": False}.get(cause)
    data: Any = (X, Y) if reads is None else Read(reads)
    augment: Any = sleeping(lambda x, draws: x)
    augment.draws = 0
    if cause != "slow augmentation":
        augment = None
    train = hvt.loader((X[: 16 * batch], Y[: 16 * batch]) if batch == 1 else data, batch, augment=augment, workers=0)
    held_out = hvt.loader(Read(True), 8, workers=0, shuffle=False)
    model, optimizer = hvt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), train, verify=False)
    saves = SlowDisk(run.path("checkpoints"), best=None)
    if cause == "compute heavy":
        model.register_forward_pre_hook(lambda *_: time.sleep(4 * SLEEP_S))
    slow_link = mock.patch.object(HorovodModel, "finish", sleeping(HorovodModel.finish, when=cause == "tiny batches"))
    with slow_link:
        for epoch in train.epochs(1 if cause == "nothing stands out" else EPOCHS):
            for x, y in train:
                optimizer.zero_grad()
                optimizer.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                if cause == "slow callbacks" or (cause == "straggler" and world.rank == 1):
                    time.sleep(SLEEP_S)
                run.step(**optimizer.record())
            if cause == "evaluation heavy":
                hvt.evaluate(model, held_out, lambda outputs, targets: {"loss": (outputs - targets).square().mean(1)})
            if cause == "frequent saves":
                saves.save(hvt.model_state(model, optimizer, train), progress=optimizer.progress)
            run.epoch(epoch, {}, 1.0, optimizer.phases())
    saves.wait()


def main() -> None:
    verdicts = {}
    with hvdtrain.init(FRAMEWORK, seed=1) as world:
        for cause in CAUSES:
            if FRAMEWORK == "keras" and cause == "tiny batches":  # Keras does all of a step in one call
                continue
            folder = FOLDER / cause.replace(" ", "-")
            with hvdtrain.RunLog(folder, world, config={}, progress=False, tensorboard=False) as run:
                (with_keras if FRAMEWORK == "keras" else with_torch)(cause, world, run)
            if world.is_main:
                found = json.loads((folder / "run.json").read_text())["result"]
                verdicts[cause] = found["verdict"]
        if world.is_main:
            print(json.dumps(verdicts), flush=True)


if __name__ == "__main__":
    main()
