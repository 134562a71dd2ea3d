"""`pipe.step(whole=True)`: the losses in which samples meet have the gradients of the unsplit model."""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import PROGRAMS

import hvdtrain.pipeline as hp
from hvdtrain.core.errors import ConfigError

SPEC = importlib.util.spec_from_file_location("whole", PROGRAMS / "torch" / "whole.py")
assert SPEC is not None and SPEC.loader is not None
PROGRAM: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(PROGRAM)
ROWS = slice(0, 18)


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", PROGRAM.LOSSES)
def test_a_loss_of_the_whole_batch_is_that_of_the_unsplit_model(name: str) -> None:
    """The twin: without whole=True three micro-batches have another loss, or are refused."""
    torch.manual_seed(1)
    model = PROGRAM.Model()
    plain, function = copy.deepcopy(model), PROGRAM.LOSSES[name]
    x, y = PROGRAM.X[ROWS], PROGRAM.targets(ROWS)
    wanted = function(plain, plain(x), y)
    wanted.backward()
    pipe = hp.split(model, x, "cpu,cpu", micro_batches=3, balance="memory")
    loss = pipe.step(x, y, lambda out, y: function(model, out, y), whole=True)
    assert float(loss) == pytest.approx(float(wanted.detach()), abs=1e-10)
    for found, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert (found.grad is None) == (right.grad is None)
        assert right.grad is None or torch.allclose(found.grad, right.grad, atol=1e-10, rtol=0)
    model.zero_grad()
    try:
        pipe.step(x, y, lambda out, y: function(model, out, y))
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        apart = max(float((a.grad - b.grad).abs().max()) for a, b in pairs if b.grad is not None)
    except ConfigError:  # refused: the mean of micro-batches is another one
        apart = math.inf
    assert apart > 1e-6
    pipe.close()
