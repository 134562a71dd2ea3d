"""Keras on PyTorch, one or more ranks: a fit with tails and batch-norm over all ranks, against plain Keras."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

import numpy as np

import hvdtrain
from hvdtrain.bench.gpu.found import Goal, not_here, say
from hvdtrain.bench.gpu.shared import through_main_memory

SAMPLES, GLOBAL_BATCH, EPOCHS = 17, 8, 2
ROUNDING = 1e-4  # Keras on PyTorch computes losses and batch-norm in float32


def check(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("keras") is None:
        return not_here("Keras is not installed")
    if args.shared:
        through_main_memory("horovod")
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with hvdtrain.init("keras", device=args.device, seed=5) as world:
        import keras

        import hvdtrain.keras as hvk

        draw = np.random.default_rng(4)
        x, y = draw.normal(size=(SAMPLES, 8, 8, 3)).astype("float32"), draw.integers(0, 5, SAMPLES)

        def net() -> Any:
            keras.utils.set_random_seed(3)
            layers = keras.layers
            parts = [layers.Conv2D(8, 3), layers.BatchNormalization(), layers.ReLU(), layers.Flatten(), layers.Dense(5)]
            model = keras.Sequential([layers.Input((8, 8, 3)), *parts])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, jit_compile=False)
            return model

        model, plain = net(), net()
        data = hvk.loader((x, y), GLOBAL_BATCH // world.size, shuffle=False)
        hvk.prepare(model, data, sync_batchnorm=True)
        model.fit(data, epochs=EPOCHS, verbose=0, callbacks=hvk.callbacks(model))
        found = hvk.evaluate(model, (x, y), per_rank_batch=4)["loss"]
        plain.fit(x, y, batch_size=GLOBAL_BATCH, shuffle=False, epochs=EPOCHS, verbose=0)
        expected = plain.evaluate(x, y, verbose=0)
        pairs = zip(model.weights, plain.weights, strict=True)
        off = max(float(np.abs(_numpy(mine) - _numpy(its)).max()) for mine, its in pairs)
        off = max(world.gather(off))
        where = model.trainable_variables[0].value.device
        goals = [Goal("weights off by", off, ROUNDING), Goal("loss off by", abs(found - expected), ROUNDING)]
        goals.append(Goal("not on the device", float(where.type != args.device), 0.0))
        if world.is_main:
            say(goals, engine=world.engine, ranks=world.size, device=str(where))
    return 0


def _numpy(variable: Any) -> np.ndarray:
    import keras

    return np.asarray(keras.ops.convert_to_numpy(variable))
