"""A training on several ranks that nothing was prepared for is reported once: each rank trains alone."""

from __future__ import annotations

import pytest
from harness import run_ranks

TORCH = """
import torch, hvdtrain
import hvdtrain.torch as hvt
world = hvdtrain.init("torch")
def trained(prepare):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if prepare:
        hvt.prepare(model, optimizer)
        return
    for _ in range(2):
        model(torch.ones(4, 2)).mean().backward()
        optimizer.step()
"""
KERAS = """
import hvdtrain
import hvdtrain.keras as hvk
import keras, numpy as np
world = hvdtrain.init("keras")
def trained(prepare):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    x, y = np.ones((8, 2)), np.ones(8)
    data = hvk.loader((x, y), per_rank_batch=2)
    def update():
        variables = model.trainable_variables
        model.optimizer.apply([keras.ops.ones_like(variable) for variable in variables], variables)
    if keras.backend.backend() == "tensorflow":
        import tensorflow
        update = tensorflow.function(update)
    if prepare:
        hvk.prepare(model, data, lr=hvdtrain.LR(base=0.01, reference_batch=2))
        update() if LOOP else model.fit(data, verbose=0)
        model.fit(data, verbose=0, callbacks=hvk.callbacks(model))
        model.train_on_batch(*next(iter(data))[:2])
    for _ in range(2 if not prepare else 0):
        update() if LOOP else model.fit(x, y, verbose=0)
        hvk.evaluate(model, data)
"""


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("torch", ""),
        ("fit", "torch"),
        ("loop", "tensorflow"),
        pytest.param("fit", "tensorflow", marks=pytest.mark.thorough),
        pytest.param("loop", "torch", marks=pytest.mark.thorough),
    ],
)
def test_a_training_without_prepare_is_reported_once(kind: str, backend: str) -> None:
    """Beside a prepared one, of which nothing is reported but that lr= needs the callbacks. Updates of a Keras loop are
    reported only before the first `prepare`."""
    code = TORCH if kind == "torch" else KERAS.replace("LOOP", str(kind == "loop"))
    order = (False, True) if kind == "loop" else (True, False)
    code += "\n".join(f"trained({prepare}); print('next', flush=True)" for prepare in order)
    done = run_ranks(["-c", code], 2, env={"KERAS_BACKEND": backend} if backend else {}, timeout_s=120).check()
    said = dict(zip(order, done.ranks_output[0].split("next"), strict=False))
    assert done.out.count("hvdtrain averages nothing") == said[False].count("hvdtrain averages nothing") == 1, done.text
    what = {"torch": "SGD.step()", "fit": "fit()"}.get(kind, "SGD.apply()")
    assert said[False].count(f"hvdtrain: {what} on 2 ranks") == 1, done.text
    fix = "model, optimizer = hvdtrain.torch.prepare(" if kind == "torch" else "hvdtrain.keras.prepare("
    assert said[False].count(f"fix: {fix}") == 1, done.text
    assert said[True].count("lr=LR(...) is not applied, the rate stays 0.01\n") == (kind != "torch"), done.text
