"""Trains with dropout, BatchNorm, a schedule and gradient accumulation, and stops, saves or goes on in the
middle.

usage: resume.py PHASE FOLDER    PHASE: both (4 epochs at once, then 2 of 4) | second (epochs 3 and 4, from
                                    the checkpoint) | elsewhere (restores first's checkpoint at another world
                                    size)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
from common import L, images, numpy_of, report, weights_of
from common import loss as make_loss

import hvdtrain

world = hvdtrain.init("keras", seed=5)
import hvdtrain.keras as hvk  # noqa: E402

SAMPLES, PER_RANK = (
    40,
    8,
)  # 2 ranks: 2 full steps and a tail of 4 each; accumulation over 2 steps is open at an epoch's end


def build() -> tuple[keras.Model, Any]:
    keras.utils.set_random_seed(11)
    model = keras.Sequential(
        [
            L.Input((6, 6, 1)),
            L.Flatten(),
            L.Dense(16),
            L.BatchNormalization(),
            L.Dropout(0.4),
            L.Dense(8, activation="relu"),
            L.Dropout(0.3, seed=2),
            L.Dense(4),
        ]
    )
    optimizer = keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=5)
    model.compile(optimizer, make_loss(), metrics=["accuracy"])
    lr = hvdtrain.LR(1e-2, 16, warmup_samples=32, schedule="cosine", total_samples=4 * SAMPLES)
    x, y = images(SAMPLES)
    data = hvk.loader((x.astype("float32"), y), PER_RANK)
    return hvk.prepare(model, data, lr=lr), data


def fit(model: keras.Model, data: Any, folder: Path, *, epochs: int, progress: Any = None, extra: Any = None) -> None:
    checkpointer = hvdtrain.Checkpointer(folder, best=None)
    with hvdtrain.RunLog(
        folder / "log", world, config={}, resume=progress is not None, progress=False, tensorboard=False
    ) as run:
        model.fit(
            data,
            epochs=epochs,
            initial_epoch=progress.epoch if progress else 0,
            verbose=0,
            callbacks=hvk.callbacks(model, checkpointer=checkpointer, run=run, extra=extra),
        )


def store(model: keras.Model, path: Path, progress: Any = None) -> None:
    """Every rank stores all it has: weights, slots, counters, rate, seeds."""
    seeds = [numpy_of(v) for v in model.variables]
    arrays = [*weights_of(model), *seeds, *[numpy_of(v) for v in model.optimizer.variables]]
    np.savez(f"{path}.rank{world.rank}.npz", *arrays)
    report(path.parent, path.name, world.rank, {"fingerprint": hvk.fingerprint(model), "progress": str(progress)})


def main(phase: str, folder: Path) -> None:
    if phase in ("whole", "both"):
        model, data = build()
        fit(model, data, folder / "whole", epochs=4)
        store(model, folder / "whole_end")
    if phase in ("first", "both"):
        keras.backend.clear_session()
        model, data = build()
        fit(model, data, folder / "parts", epochs=2, extra={"table": np.arange(3.0)})
        store(model, folder / "first_end")
    if phase in ("second", "elsewhere"):
        model, data = build()
        extra = {"table": np.zeros(3)}
        progress = hvdtrain.Checkpointer(folder / "parts", best=None).restore(hvk.model_state(model, extra=extra))
        assert progress is not None and extra["table"].tolist() == [0, 1, 2], "the callbacks saved it"
        if phase == "second":
            store(model, folder / "restored", progress)
            fit(model, data, folder / "parts", epochs=4, progress=progress)
        store(model, folder / f"{phase}_end", progress)
    world.barrier()
    world.comm.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
