"""The prepared model of an elastic job: what of it goes to whom when the ranks change.

How ranks go over to the next formation: `hvdtrain.core.in_step.elastic`.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from typing import Any
from weakref import ref

import torch

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.in_step.elastic import Member
from hvdtrain.runs.parts import Part
from hvdtrain.torch import start
from hvdtrain.torch.checkpoint import ModelPart, TrainingPart
from hvdtrain.torch.data.loader import known
from hvdtrain.torch.update.optimizer import Optimizer
from hvdtrain.torch.update.regroup import RULE, extras_of, load, written


class Trained(Member):
    """The one prepared model of an elastic job.

    Args:
        optimizer: as `prepare` returns it.
        earlier: what was prepared before.

    Raises:
        ConfigError: that is another model, which is still there.
    """

    def __init__(self, optimizer: Optimizer, earlier: Member | None) -> None:
        before = earlier.held() if isinstance(earlier, Trained) else None
        if before is not None and before.session.module is not optimizer.session.module:
            raise ConfigError(
                RULE,
                "a second prepared model",
                "leave --min-np, --max-np and --host-discovery out; or train it after the first one is dropped",
                shared=True,
            )
        self._optimizer: ref[Optimizer] = ref(optimizer)

    def held(self) -> Optimizer | None:
        """The optimizer, while it is there."""
        return self._optimizer()

    @property
    def _its(self) -> Optimizer:
        found = self._optimizer()
        assert found is not None  # it is training
        return found

    @property
    def updates(self) -> int:
        return self._its.progress.step

    def place(self) -> Any:
        session = self._its.session
        return {"loader": session.batches.state(), "stepped": session.engine_model.stepped}

    def _parts(self) -> dict[str, Part]:
        session = self._its.session
        return {
            "training.pt": TrainingPart(self._its, None),
            "model.safetensors": ModelPart(session.module, session.world),
        }

    def state(self) -> bytes:
        return pickle.dumps(written(self._parts() | extras_of(self._its.session)))

    def take(self, state: bytes, *, new: bool) -> None:
        found: Mapping[str, bytes] = pickle.loads(state)
        load(self._parts(), found)
        if new:  # a rank that is one update behind is still in that batch, and does what follows on it
            load(extras_of(self._its.session), found)

    def go_on(self, place: Any, *, late: bool) -> None:
        session = self._its.session
        data = session.batches.data
        assert data is not None  # checked
        left_out = not late and data.running and data.step is not None and data.in_weights is not data.step
        session.gradients.restart()
        session.losses.forget()
        session.batches.restart()
        session.engine_model.begin_again(place["stepped"])
        self._its.compare_replicas()
        for parameter in session.gradients.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for loader in known:
            if loader.world is session.world:
                loader.redeal(place["loader"])
        start.split_streams(session.world, "formation", os.environ["HOROVOD_SIZE"], self.updates)
        if left_out:
            assert session.before is not None
            session.before.keep()
