"""Several optimizers of one model that step together, as one: for example Muon for matrices, AdamW for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor

from hvdtrain.core.errors import ConfigError


class Several(torch.optim.Optimizer):
    """The optimizer that `prepare` makes of a list of two or more: it has the groups of all, and a state dict like any
    other's."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # not torch's own __init__: groups and state are the members'
        self.members = list(optimizers)
        self.defaults = {}
        held = [p for member in self.members for group in member.param_groups for p in group["params"]]
        if len({id(parameter) for parameter in held}) < len(held):
            raise ConfigError(
                "a parameter cannot be in two optimizers",
                f"{len(held) - len({id(p) for p in held})} of {len(held)} are in two",
                "give each optimizer its own parameters: all of them step in every update",
            )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override]
        """The states of all members; a new one is set in the member that has the parameter."""
        return MappingProxyType({p: state for member in self.members for p, state in member.state.items()})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for member in self.members:
            member.step()

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.members[0].register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.members[-1].register_step_post_hook(hook)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for member in self.members:
            member.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as that of one optimizer: parameters are numbered through."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for member in self.members:
            first = sum(len(group["params"]) for group in groups)
            own = member.state_dict()
            state |= {first + number: value for number, value in own["state"].items()}
            groups += [
                {**group, "params": [first + number for number in group["params"]]} for group in own["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state, groups = state_dict["state"], list(state_dict["param_groups"])
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"loaded state dict has {len(groups)} parameter groups, {kind_of(self)} {len(self.param_groups)}"
            )
        for member in self.members:
            own, groups = groups[: len(member.param_groups)], groups[len(member.param_groups) :]
            numbers = [number for group in own for number in group["params"]]
            member.load_state_dict(
                {"state": {n: state[n] for n in numbers if n in state}, "param_groups": own}  # any numbers will do
            )

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        raise ConfigError(
            "add_param_group() must be called on one of the optimizers",
            f"add_param_group() of {kind_of(self)}",
            "call it on the optimizer to which the group belongs, one of those given to prepare()",
        )

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self.members))}]"


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    return " + ".join(type(member).__name__ for member in members_of(optimizer))


def members_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Returns the plain optimizers that step: one, or several."""
    return optimizer.members if isinstance(optimizer, Several) else [optimizer]
