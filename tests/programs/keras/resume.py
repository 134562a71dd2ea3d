"""Trains with dropout, BatchNorm, a schedule and gradient accumulation, and stops, saves or resumes in the middle.

usage: resume.py PHASE FOLDER [MODEL.keras]
    PHASE: both (4 epochs at once, then 2 of 4) | second (epochs 3 and 4, from the checkpoint) | plain (loads a
    checkpoint's model.keras as anybody would, where neither Horovod nor hvdtrain can be imported, and trains it)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
from common import L, block, images, numpy_of, report, weights_of
from common import loss as make_loss

PLAIN = sys.argv[1] == "plain"
if PLAIN:
    block("horovod", "hvdtrain")
else:
    import hvdtrain

    world = hvdtrain.init("keras", seed=5)
    import hvdtrain.keras as hvk

# 2 ranks: 2 full steps and a tail of 4 each; accumulation over 2 steps is open at an epoch's end
SAMPLES, PER_RANK = 40, 8


def build() -> tuple[keras.Model, Any]:
    keras.utils.set_random_seed(11)
    inner = [L.Flatten(), L.Dense(16), L.BatchNormalization(), L.Dropout(0.4), L.Dense(8, activation="relu")]
    model = keras.Sequential([L.Input((6, 6, 1)), *inner, L.Dropout(0.3, seed=2), L.Dense(4)])
    optimizer = keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=5)
    # tracing takes longer than these steps
    model.compile(optimizer, make_loss(), metrics=["accuracy"], run_eagerly=True)
    lr = hvdtrain.LR(1e-2, 16, warmup_samples=32, schedule="cosine", total_samples=4 * SAMPLES)
    x, y = images(SAMPLES)
    data = hvk.loader((x.astype("float32"), y), PER_RANK)
    return hvk.prepare(model, data, lr=lr), data


def fit(model: keras.Model, data: Any, folder: Path, *, epochs: int, progress: Any = None, extra: Any = None) -> None:
    checkpointer, first = hvdtrain.Checkpointer(folder, best=None), progress.epoch if progress else 0
    log = {"config": {}, "resume": progress is not None, "progress": False, "tensorboard": False}
    with hvdtrain.RunLog(folder / "log", world, **log) as run:
        callbacks = hvk.callbacks(model, checkpointer=checkpointer, run=run, extra=extra)
        model.fit(data, epochs=epochs, initial_epoch=first, verbose=0, callbacks=callbacks)


def store(model: keras.Model, path: Path, progress: Any = None) -> None:
    """Every rank stores all it has: weights, slots, counters, rate, seeds."""
    seeds = [numpy_of(v) for v in model.variables]
    arrays = [*weights_of(model), *seeds, *[numpy_of(v) for v in model.optimizer.variables]]
    np.savez(f"{path}.rank{world.rank}.npz", *arrays)
    report(path.parent, path.name, world.rank, {"fingerprint": hvk.fingerprint(model), "progress": str(progress)})


def main(phase: str, folder: Path) -> None:
    if phase == "both":
        model, data = build()
        fit(model, data, folder / "whole", epochs=4)
        store(model, folder / "whole_end")
        keras.backend.clear_session()
        model, data = build()
        fit(model, data, folder / "parts", epochs=2, extra={"table": np.arange(3.0)})
        store(model, folder / "first_end")
    else:
        model, data = build()
        extra = {"table": np.zeros(3)}
        progress = hvdtrain.Checkpointer(folder / "parts", best=None).restore(hvk.model_state(model, extra=extra))
        assert progress is not None and extra["table"].tolist() == [0, 1, 2], "the callbacks saved it"
        store(model, folder / "restored", progress)
        fit(model, data, folder / "parts", epochs=4, progress=progress)
        store(model, folder / "second_end", progress)
    world.barrier()
    world.comm.shutdown()


def plainly(folder: Path, saved: str) -> None:
    model = keras.models.load_model(saved)
    weights = weights_of(model)
    updates = int(numpy_of(model.optimizer.iterations))
    np.savez(folder / "plain.npz", *weights)
    x, y = images(16)
    model.fit(x.astype("float32"), y, epochs=2, verbose=0)
    moved = max(float(np.abs(a - b).max()) for a, b in zip(weights, weights_of(model), strict=True))
    print(f"loaded {type(model.optimizer).__name__} updates={updates} moved={moved > 0}")
    assert not any(name.split(".")[0] in ("horovod", "hvdtrain") for name in sys.modules), "imported after all"


if __name__ == "__main__":
    if PLAIN:
        plainly(Path(sys.argv[2]), sys.argv[3])
    else:
        main(sys.argv[1], Path(sys.argv[2]))
