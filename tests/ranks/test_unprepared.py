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
import hvdtrain
import hvdtrain.keras as hvk
import keras, numpy as np
world = hvdtrain.init("keras")
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
data = hvk.loader((np.ones((8, 2)), np.ones(8)), per_rank_batch=2)
if PREPARED:
    hvk.prepare(model, data)
    model.fit(data, verbose=0, callbacks=hvk.callbacks(model))
else:
    for _ in range(2):
        model.fit(np.ones((8, 2)), np.ones(8), verbose=0)
"""


@pytest.mark.parametrize(("program", "framework"), [(TORCH, "torch"), (KERAS, "keras")], ids=["torch", "keras"])
@pytest.mark.parametrize("prepared", [False, True])
def test_a_training_without_prepare_is_reported_once(program: str, framework: str, prepared: bool) -> None:
    code = program.replace("PREPARED", str(prepared))
    done = run_ranks(["-c", code], 2, env={"KERAS_BACKEND": "torch"}, timeout_s=120).check()
    assert done.out.count("hvdtrain averages nothing") == (not prepared), done.text
    fixes = done.out.count(f"fix: {'model, optimizer = ' * (framework == 'torch')}hvdtrain.{framework}.prepare(")
    # beside a prepared model, torch reports the plain optimizer in other words
    assert fixes == (not prepared or framework == "torch"), done.text
