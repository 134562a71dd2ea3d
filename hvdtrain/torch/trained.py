"""The prepared model of an elastic job: what of it goes to whom when the ranks change.

How ranks go over to the next formation: `hvdtrain.comm.elastic`.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import nn

from hvdtrain.checkpoint.parts import Part
from hvdtrain.comm.elastic import Member
from hvdtrain.core.errors import ConfigError, ReplicaError
from hvdtrain.torch.checkpoint import ModelPart, TrainingPart, put_others
from hvdtrain.torch.data.loader import known
from hvdtrain.torch.update import start
from hvdtrain.torch.update.optimizer import Optimizer
from hvdtrain.torch.update.regroup import RULE
from hvdtrain.torch.update.session import extras_of, load, written


@dataclass(frozen=True)
class ModuleState:
    """A module's state outside its checkpoint; a new process has it as the top of the program made it."""

    shapes: dict[str, tuple[int, ...]]  # of parameters and buffers, by name
    trains: set[str]  # the parameters that have a gradient
    buffers: dict[str, torch.Tensor]  # those that no checkpoint holds
    modes: dict[str, bool]  # by module: whether it is in training mode

    @classmethod
    def of(cls, module: nn.Module) -> ModuleState:
        saved = module.state_dict().keys()
        tensors = dict(chain(module.named_parameters(), module.named_buffers()))
        return cls(
            {name: tuple(tensor.shape) for name, tensor in tensors.items()},
            {name for name, parameter in module.named_parameters() if parameter.requires_grad},
            {name: buffer.detach().cpu() for name, buffer in module.named_buffers() if name not in saved},
            {name: part.training for name, part in module.named_modules()},
        )

    def check(self, module: nn.Module) -> None:
        """Raises `ReplicaError` where the module of a new process is made otherwise."""
        mine = ModuleState.of(module)
        differs = [name for name in self.shapes | mine.shapes if self.shapes.get(name) != mine.shapes.get(name)]
        if differs or self.modes.keys() != mine.modes.keys():
            name = differs[0] if differs else min(self.modes.keys() ^ mine.modes.keys())
            raise ReplicaError(
                "a new rank must build the model that the other ranks have",
                f"{name}: {mine.shapes.get(name, 'absent')}, {self.shapes.get(name, 'absent')} on the other ranks",
                "build the whole model before the loop over epochs",
            )

    def load(self, module: nn.Module, *, new: bool) -> None:
        """Makes it so; modes and what trains for new processes: others follow their own loops."""
        with torch.no_grad():
            for name, buffer in self.buffers.items():
                module.get_buffer(name).copy_(buffer)
        for name, parameter in module.named_parameters() if new else ():
            parameter.requires_grad_(name in self.trains)
        for name, part in module.named_modules() if new else ():
            part.training = self.modes[name]


class Trained(Member):
    """The one prepared model of an elastic job; raises `ConfigError` if what was prepared earlier is another model,
    which is still there."""

    def __init__(self, optimizer: Optimizer, earlier: Member | None) -> None:
        before = earlier.held() if isinstance(earlier, Trained) else None
        if before is not None and before.session.module is not optimizer.session.module:
            raise ConfigError(
                RULE,
                "a second prepared model",
                "remove --min-np, --max-np and --host-discovery; or delete the first model before the second",
                shared=True,
            )
        self._optimizer: ref[Optimizer] = ref(optimizer)
        self._new = False

    def held(self) -> Optimizer | None:
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
        assert session.before is not None
        data = session.batches.data
        assert data is not None  # checked
        others = [other.state_of_next_loop() for other in data.others(())]  # what was under way is torn
        state = {"loader": session.batches.state(), "stepped": session.engine_model.stepped, "others": others}
        return state | {"losses": session.before.losses}

    def _parts(self) -> dict[str, Part]:
        session = self._its.session
        return {
            "training.pt": TrainingPart(self._its, None),
            "model.safetensors": ModelPart(session.module, session.world),
        }

    def state(self) -> bytes:
        session = self._its.session
        return pickle.dumps((written(self._parts() | extras_of(session)), ModuleState.of(session.module)))

    def take(self, state: bytes, *, new: bool) -> None:
        session = self._its.session
        files, kept = pickle.loads(state)  # of a rank of this job
        if new:
            kept.check(session.module)
        load(self._parts(), files)
        kept.load(session.module, new=new)
        if new:  # a rank that is one update behind is still in that batch, and does what follows on it
            load(extras_of(session), files)
        self._new = new

    def go_on(self, place: Any, *, late: bool) -> None:
        session = self._its.session
        data = session.batches.data
        assert data is not None and session.before is not None  # checked
        new, self._new = self._new, False
        if new:
            session.before.expected = place["losses"]
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
        if new:
            put_others(data.others(()), place["others"])
        start.split_streams(session.world, "formation", os.environ["HOROVOD_SIZE"], self.updates)
        if left_out:
            session.before.keep()
