"""A training on several ranks that nothing was prepared for is reported: each rank trains alone."""

from __future__ import annotations

import pytest
from harness import run_ranks

TORCH = """
import sys, torch, hvdtrain
import hvdtrain.torch as hvt
world = hvdtrain.init("torch")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if PREPARED:
    other = torch.nn.Linear(2, 1)
    hvt.prepare(other, torch.optim.SGD(other.parameters(), 0.1))
for _ in range(2):
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
"""
KERAS = """
import os
os.environ["KERAS_BACKEND"] = KIND.partition("-")[0]
import hvdtrain
import hvdtrain.keras as hvk
import keras, numpy as np
world = hvdtrain.init("keras")
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
data = hvk.loader((np.ones((8, 2)), np.ones(8)), per_rank_batch=2)
def update():
    variables = model.trainable_variables
    model.optimizer.apply([keras.ops.ones_like(variable) for variable in variables], variables)
if keras.backend.backend() == "tensorflow":
    import tensorflow
    update = tensorflow.function(update)
if PREPARED:
    hvk.prepare(model, data, lr=hvdtrain.LR(base=0.01, reference_batch=2))
    update() if "loop" in KIND else model.fit(data, verbose=0)
    model.fit(data, verbose=0, callbacks=hvk.callbacks(model))
    model.train_on_batch(*next(iter(data))[:2])
elif "loop" in KIND:
    update()
    hvk.evaluate(model, data)
    update()
else:
    for _ in range(2):
        model.fit(np.ones((8, 2)), np.ones(8), verbose=0)
"""
KINDS = {"optimizer": TORCH, "torch-fit": KERAS, "torch-loop": KERAS, "tensorflow-loop": KERAS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prepared", [False, True])
def test_a_training_without_prepare_is_reported_once(kind: str, prepared: bool) -> None:
    code = KINDS[kind].replace("PREPARED", str(prepared)).replace("KIND", repr(kind))
    done = run_ranks(["-c", code], 2, timeout_s=120).check()
    reported = not prepared or kind == "optimizer"  # which is also beside a prepared model
    assert done.out.count("hvdtrain averages nothing") == reported, done.text
    what = {"optimizer": "SGD.step()", "torch-fit": "fit()"}.get(kind, "SGD.apply()")
    assert done.out.count(f"hvdtrain: {what} on 2 ranks") == reported, done.text
    without_callbacks = prepared and kind != "optimizer"
    assert done.out.count("lr=LR(...) is not applied, the rate stays 0.01\n") == without_callbacks, done.text
    fix = "model, optimizer = hvdtrain.torch.prepare(" if kind == "optimizer" else "hvdtrain.keras.prepare("
    assert done.out.count(f"fix: {fix}") == reported, done.text
