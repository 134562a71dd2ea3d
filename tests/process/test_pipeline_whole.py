"""`pipe.step(whole=True)`: the losses in which samples meet have the gradients of the unsplit model."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import PROGRAMS
from limits import Limit

import hvdtrain.pipeline as hp

SPEC = importlib.util.spec_from_file_location("whole", PROGRAMS / "torch" / "whole.py")
assert SPEC is not None and SPEC.loader is not None
PROGRAM: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(PROGRAM)
ROWS = slice(0, 18)
# the others differ in the loss only, which is called once
WAYS = {"clip": {"remat": "all"}, "whitening": {"schedule": "gpipe", "remat": "except_last"}, "lovasz": {}}
NAMES = [name if name in WAYS else pytest.param(name, marks=pytest.mark.thorough) for name in PROGRAM.LOSSES]


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_of_the_whole_batch_is_that_of_the_unsplit_model(name: str, limit: Limit) -> None:
    torch.manual_seed(1)
    model = PROGRAM.Model()
    plain, function = copy.deepcopy(model), PROGRAM.LOSSES[name]
    x, y = PROGRAM.X[ROWS], PROGRAM.targets(ROWS)
    outputs = plain(x)
    wanted = function(plain, outputs, y)
    wanted.backward()
    ways: Any = WAYS.get(name, {})
    pipe = hp.split(model, x, "cpu,cpu", micro_batches=3, balance="memory", **ways)
    loss, found = pipe.step(x, y, lambda out, y: function(model, out, y), whole=True, outputs=True)
    assert float(loss) == pytest.approx(float(wanted.detach()), abs=1e-10)
    assert all(torch.allclose(found[key], outputs[key], atol=1e-10, rtol=0) for key in outputs)
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
    assert all((a is None) == (b is None) for a, b in pairs)
    gap = max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None)
    assert gap <= 1e-10
    if name == "clip":
        limit("P9g", "a contrastive loss: `step(..., whole=True)`", exact=gap)
    pipe.close()
