"""Splits a model over the local devices of one process, and trains it as a pipeline.

::

    pipe = hvdtrain.pipeline.split(model, example, ["cuda:0", "cuda:1"])
    for x, y in data:
        optimizer.zero_grad()
        loss = pipe.step(x, y, loss_fn)      # forward and backward of all micro-batches
        optimizer.step()

Parameters, their names and state dicts are those of the unsplit model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain.core import public

# looked up on first use: planning needs no framework
__getattr__, __dir__, __all__ = public(__name__, {
    "run.runtime": "Pipeline StageError",
    "splitting": "split",
    "tuning.planner": "plans",
    "tuning.plots": "plot",
    "tuning.profiles": "Profile profile",
    "tuning.search_size": "Trial Tuning tune",
})  # fmt: skip


if TYPE_CHECKING:
    from hvdtrain.pipeline.splitting import split as split
