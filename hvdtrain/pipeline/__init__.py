"""A model split over the local devices of one process: traced, cut where it pays, run as a pipeline.

::

    pipe = hvdtrain.pipeline.split(model, example, ["cuda:0", "cuda:1"])
    for x, y in data:
        optimizer.zero_grad()
        loss = pipe.step(x, y, loss_fn)      # forward and backward of all micro-batches
        optimizer.step()

The model stays the user's: its parameters, their names and its state dict are those of the unsplit model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# looked up on first use: planning needs no framework
_HOME_OF = {
    "Pipeline": "runtime",
    "Profile": "profiling",
    "StageError": "runtime",
    "Trial": "tuning",
    "Tuning": "tuning",
    "plans": "planner",
    "plot": "plots",
    "profile": "profiling",
    "split": "splitting",
    "tune": "tuning",
}

__all__ = sorted(_HOME_OF)

if TYPE_CHECKING:
    from hvdtrain.pipeline.splitting import split as split


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hvdtrain.pipeline' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hvdtrain.pipeline.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
