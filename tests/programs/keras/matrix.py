"""Trains every configuration the adapter supports, each a few steps, and stores the weights: the parity tests
compare them.

usage: matrix.py OUT.npz case ...      one process trains on the whole global batch, two ranks on a half each
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
from common import BACKEND, block, cnn, images, loss, numpy_of, text, tokens, weights_of

O = keras.optimizers  # noqa: E741
GLOBAL_BATCH, RANKS = 16, 2


class Rmse(keras.metrics.RootMeanSquaredError):
    """A metric that is no mean of batches: averaging results over ranks gets it wrong, summing states does
    not.
    """

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        chosen = keras.ops.cast(keras.ops.argmax(y_pred, axis=-1), self.dtype)
        return super().update_state(keras.ops.cast(y_true, self.dtype), chosen, sample_weight)


def deferred() -> keras.Model:
    return cnn(with_input=False)


def multi() -> Any:
    return O.MultiOptimizer(O.OptimizerMap(O.SGD(0.05), {".*kernel": O.Adam(1e-2)}))


# fields: optimizer, model, compile arguments, prepare arguments, data, samples, dtype policy
CASES: dict[str, dict[str, Any]] = {
    "sgd": {"opt": lambda: O.SGD(0.1), "metrics": True},
    "global_clipnorm": {"opt": lambda: O.AdamW(1e-2, weight_decay=0.1, global_clipnorm=0.05)},
    "accumulate_clip": {"opt": lambda: O.SGD(0.5, clipnorm=0.05, gradient_accumulation_steps=4)},
    "loss_scale": {"opt": lambda: O.LossScaleOptimizer(O.Adam(1e-2))},
    "muon": {"opt": lambda: O.Muon(1e-2)},
    "multi": {"opt": multi},
    "embedding_adam": {"opt": lambda: O.Adam(1e-2), "model": text, "data": tokens},
    "embedding_clip": {"opt": lambda: O.SGD(0.5, global_clipnorm=0.05), "model": text, "data": tokens},
    "embedding_accumulate": {"opt": lambda: O.SGD(0.5, gradient_accumulation_steps=2), "model": text, "data": tokens},
    "embedding_dense": {"opt": lambda: O.SGD(0.5), "model": text, "data": tokens, "prepare": {"sparse_as_dense": True}},
    "deferred_tail": {"opt": lambda: O.Adam(1e-2), "model": deferred, "samples": 17, "metrics": True},
    "jit_compile": {"opt": lambda: O.Adam(1e-2), "compile": {"jit_compile": True}},
    "fp16": {"opt": lambda: O.SGD(0.1), "prepare": {"compression": "fp16"}},
    # low precision rounds with the batch size: the twin of N ranks is one process that accumulates N
    # micro-batches
    "mixed_float16": {"opt": O.SGD, "policy": "mixed_float16", "micro": True},
    # negative twin: the same job with the averaging switched off must differ
    "off": {"opt": lambda: O.SGD(0.1), "off": True},
}


def build(case: dict[str, Any], world: Any, hvk: Any) -> tuple[keras.Model, Any]:
    options = {"learning_rate": 1e-2} if case.get("micro") else {}
    if case.get("micro") and world.size == 1:
        options["gradient_accumulation_steps"] = RANKS
    optimizer, prepare = case["opt"](**options), case.get("prepare", {})
    model = case.get("model", cnn)()
    options = dict(case.get("compile", {}))
    if "jit_compile" in options and world.size == 1:
        options.pop("jit_compile")
    options.setdefault("jit_compile", False)
    model.compile(
        optimizer, loss(), metrics=["accuracy", Rmse(name="rmse")] if case.get("metrics") else None, **options
    )
    hvk.prepare(model, world=world, **prepare, **({"verify": False} if case.get("off") else {}))
    return model, model.optimizer


def micro_batches(world: Any, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """This rank's samples such that one process over all micro-batches in turn sees the same ones."""
    if world.size == 1:
        return x, y
    chosen = np.arange(len(x)).reshape(-1, RANKS, GLOBAL_BATCH // RANKS)[:, world.rank].reshape(-1)
    return x[chosen], y[chosen]


def train(name: str, case: dict[str, Any], world: Any, hvk: Any) -> tuple[keras.Model, dict[str, list[float]]]:
    keras.config.set_dtype_policy(case.get("policy", "float64"))
    keras.config.set_floatx("float64" if "policy" not in case else "float32")
    keras.utils.set_random_seed(100 + world.rank)  # replicas start apart: only the broadcast makes them equal
    if world.size > 1 and world.rank == world.size - 1 and name == "sgd":
        cnn()  # a model more on one rank: names of layers and graphs differ from here on
    x, y = case.get("data", images)(case.get("samples", 64))
    model, optimizer = build(case, world, hvk)
    if case.get("micro"):
        x, y = micro_batches(world, x.astype("float32"), y)
        callbacks = hvk.callbacks(model)
        options = {"epochs": 2, "shuffle": False, "verbose": 0, "callbacks": callbacks}
        return model, model.fit(x, y, batch_size=GLOBAL_BATCH // RANKS, **options).history
    data = hvk.loader((x, y), GLOBAL_BATCH // world.size, world=world, seed=3)
    callbacks = hvk.callbacks(model)
    if case.get("off") and world.size > 1:
        callbacks[0].on_train_begin = switch_off(callbacks[0])
    from hvdtrain.keras.state import replicas

    with mock.patch.object(replicas, "check_equal", replicas.check_equal):  # `switch_off` takes it away for this fit
        history = model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
    return model, history.history


def switch_off(start: Any) -> Callable[..., None]:
    """After all checks have passed, gives the optimizer its own ``apply`` back, and keeps the comparisons of replicas
    from seeing it: what an averaging that fails looks like.
    """
    from hvdtrain.keras.state import replicas

    original = start.on_train_begin

    def on_train_begin(logs: Any = None) -> None:
        original(logs)
        replicas.check_equal = lambda *_, **__: None
        vars(start.model.optimizer)["apply"] = type(start.model.optimizer).apply.__get__(start.model.optimizer)

    return on_train_begin


def main(out: str, wanted: list[str]) -> None:
    import hvdtrain

    if "HOROVOD_RANK" not in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ:
        block("horovod")
    world = hvdtrain.init("keras", seed=5)
    import hvdtrain.keras as hvk

    arrays: dict[str, np.ndarray] = {}
    facts: dict[str, Any] = {}
    for name in wanted:
        case = CASES[name]
        keras.backend.clear_session()
        if BACKEND == "tensorflow" and world.size == 1:
            import tensorflow as tf

            tf.config.run_functions_eagerly(not case.get("micro"))  # tracing takes longer than these steps
        try:
            model, history = train(name, case, world, hvk)
        except Exception:
            print(f"rank {world.rank}: case {name} failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            os._exit(3)
        for i, value in enumerate(weights_of(model)):
            arrays[f"{name}/{i}"] = value.astype(np.float64)
        prints = world.gather(hvk.fingerprint(model))
        facts[name] = {
            "equal": len(set(prints)) == 1,
            "history": history,
            "proof": str(vars(model)["_hvdtrain"].proofs.proof if "_hvdtrain" in vars(model) else None),
            "iterations": int(numpy_of(model.optimizer.iterations)),
            "jit": bool(model.jit_compile),
        }
    if world.is_main:
        np.savez(out, **arrays)
        with open(out + ".json", "w") as file:
            json.dump(facts, file, default=float)
    world.barrier()
    world.comm.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
