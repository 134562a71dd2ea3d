"""ZeRO stage 1: each rank keeps the optimizer's state of some parameters, and steps those.

Gradients are whole on every rank. Before a step each rank hides the gradients of other ranks' parameters from the
user's optimizer, which skips parameters without a gradient and makes no state for them. After it each parameter's rank
broadcasts the new value. (Rajbhandari et al., arXiv 1910.02054, section 5.1.)
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim

from hvdtrain.core.errors import ConfigError
from hvdtrain.torch.engines.base import EngineModel
from hvdtrain.torch.engines.buffers import broadcast_
from hvdtrain.values.nested import map_tensors
from hvdtrain.world.world import World

# A parameter's update depends on its own gradient and state alone. Of others' optimizers that cannot be known: some
# look at norms over all parameters, at each other's groups, or keep numbers of their own.
_BY_PARAMETER = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Adagrad,
    optim.Adadelta, optim.ASGD, optim.Rprop,
)  # fmt: skip


class ZeroModel:
    """An `EngineModel` whose ranks share out the optimizer's state. The user's optimizer has that of this rank's
    parameters, and refuses a step or a state dict of its own."""

    def __init__(self, model: EngineModel, optimizer: torch.optim.Optimizer, world: World) -> None:
        if type(optimizer) not in _BY_PARAMETER:
            raise ConfigError(
                "the optimizer must update each parameter from its own gradient and state alone with zero=",
                f"{_name_of(optimizer)}, which is not known to do so",
                f"use zero=0, or an optimizer of torch.optim: {', '.join(kind.__name__ for kind in _BY_PARAMETER)}",
            )
        self._model, self._optimizer, self._world = model, optimizer, world
        self.call, self.backward, self.finish = model.call, model.backward, model.finish
        self._refusal = _SplitState(optimizer)
        self.keep_own_state()

    def _owned(self) -> list[tuple[nn.Parameter, int]]:
        """Returns the optimizer's parameters, each with its rank: that with the fewest elements so far."""
        elements = [0] * self._world.size
        owned = []
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                rank = elements.index(min(elements))
                elements[rank] += parameter.numel()
                owned.append((parameter, rank))
        return owned

    def step(self, closure: Callable[[], object] | None = None) -> None:
        """Steps this rank's parameters; then every rank has all of them. Raises `ConfigError` for a closure."""
        if closure is not None:
            raise ConfigError("step(closure) is not supported with zero=", "step(closure)", "step(), or zero=0")
        owned = self._owned()
        gradients = [parameter.grad for parameter, _ in owned]

        def hide(*_: object) -> None:
            for parameter, rank in owned:
                if rank != self._world.rank:
                    parameter.grad = None

        last = self._optimizer.register_step_pre_hook(hide)  # after the user's, which see all gradients
        try:
            with self._refusal.lifted():
                self._model.step()
        finally:
            last.remove()
            for (parameter, _), gradient in zip(owned, gradients, strict=True):
                parameter.grad = gradient
        for root in range(self._world.size):
            broadcast_([parameter for parameter, rank in owned if rank == root], self._world, root)

    def keep_own_state(self) -> None:
        """Drops the state of other ranks' parameters, which was loaded whole."""
        for parameter, rank in self._owned():
            if rank != self._world.rank:
                self._optimizer.state.pop(parameter, None)

    def state_dict(self, *, keep: bool = True) -> dict[str, Any]:
        """Returns the state dict of the whole optimizer; collective. Ranks that do not `keep` it get no states."""
        with self._refusal.lifted():
            content = self._optimizer.state_dict()
        states = {}
        for index, (_, rank) in enumerate(self._owned()):
            own = content["state"].get(index) if rank == self._world.rank else None
            sent = self._world.comm.broadcast_bytes(pickle.dumps(map_tensors(Tensor.cpu, own)), rank)
            state = pickle.loads(sent) if keep else None
            if state is not None:
                states[index] = state
        return content | {"state": states}

    def give_back(self, content: dict[str, Any]) -> None:
        """Loads the whole state into the user's optimizer, which is plain again."""
        self._refusal.remove()
        self._optimizer.load_state_dict(content)

    def close(self) -> None:
        self._model.close()


def _name_of(optimizer: torch.optim.Optimizer) -> str:
    return "a list of optimizers" if type(optimizer).__module__.startswith("hvdtrain.") else type(optimizer).__name__


class _SplitState:
    """Refuses steps and state dicts of an optimizer that has only a part of its state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._is_lifted = False
        step, state_dict = optimizer.register_step_pre_hook, optimizer.register_state_dict_pre_hook
        self._handles = [step(self._refuse), state_dict(self._refuse)]

    @contextmanager
    def lifted(self) -> Iterator[None]:
        self._is_lifted = True
        try:
            yield
        finally:
            self._is_lifted = False

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _refuse(self, *_: object) -> None:
        if not self._is_lifted:
            raise ConfigError(
                "the plain optimizer cannot be used with zero=: its state is split over the ranks",
                "a step or a state dict of the plain optimizer",
                "use state_dict() and load_state_dict() of the prepared optimizer, on every rank;\n"
                "close() of the prepared optimizer returns the state to the plain optimizer",
            )
