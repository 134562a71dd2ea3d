"""ZeRO stages 1 and 2: each rank keeps the optimizer's state of a part of the weights, and steps that part.

DeepSpeed lays the weights of a group end to end, cuts them into as many equal parts as there are ranks, steps its own
part and gathers the others' (Rajbhandari et al., arXiv 1910.02054; DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py).
It takes over the groups of the optimizer it is given: a twin of the user's, whose own keeps its groups, rates and
hooks. What is written here is what lies between the two, and what a flat part means in names and shapes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn, optim

from hvdtrain.core.errors import CheckpointError, ConfigError
from hvdtrain.torch.engines.base import Piece

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# An element's update depends on its own gradient and state alone. Of others' optimizers that cannot be known: some look
# at norms, at shapes, at each other's groups, or keep numbers of their own, and some only later.
_BY_ELEMENT = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Adagrad,
    optim.Adadelta, optim.ASGD, optim.Rprop,
)  # fmt: skip
_COMMON = ("step", "mu_product", "mu", "eta")  # their states that all weights of a group have in common


class Parts:
    """The parts of the weights, of which this is `rank`'s, and the optimizer's state cut in the same places. The
    user's optimizer has its state whole, until `share_out` takes it away; DeepSpeed (`zero` is its
    `DeepSpeedZeroOptimizer`) was given the twin."""

    def __init__(
        self,
        user: torch.optim.Optimizer,
        twin: torch.optim.Optimizer,
        zero: Any,
        rank: int,
        gather: Callable[[Tensor], Tensor],
    ) -> None:
        self._user, self._twin, self._zero, self._gather = user, twin, zero, gather
        self._others: dict[Any, Any] = {}  # states of what is not trained
        zero.optimizer = twin  # it makes another Adagrad, of one group
        zero._hp_optimizer_states_linked = True  # for its own readers of states, which would link that one's
        self.parameters = [_trained(group) for group in _groups(user)]
        self._flats: list[Tensor] = [group["params"][0] for group in twin.param_groups]
        self.pieces = [
            _pieces(parameters, len(flat) * rank, len(flat) * (rank + 1))
            for parameters, flat in zip(self.parameters, self._flats, strict=True)
        ]
        for index, flat in enumerate(self._flats):
            # types are the same: DeepSpeed's copy of the part can be the part itself, and so what the module has, who
            # changes it (a checkpoint, an average of weights)
            flat.data = zero.parallel_partitioned_bit16_groups[index][rank]
        self._places = [(p, p.data_ptr()) for parameters in self.parameters for p in parameters]
        self.share_out()

    # -- steps -----------------------------------------------------------------------------------------------
    def fill(self) -> None:
        """Hands DeepSpeed the gradients of this rank's part, of `p.grad`, which are those of all ranks."""
        for index, pieces in enumerate(self.pieces):
            gradients = [_flat(piece.parameter.grad)[piece.start : piece.stop] for piece in pieces]
            self.give(index, gradients)

    def give(self, index: int, gradients: list[Tensor]) -> None:
        flat = self._flats[index]
        padding = len(flat) - sum(map(len, gradients))
        self._zero.averaged_gradients[index] = [*gradients, flat.new_zeros(padding)] if padding else gradients

    def held(self) -> list[tuple[Piece, Tensor]]:
        """Returns the pieces of this rank with their gradients, as DeepSpeed has them."""
        given = self._zero.averaged_gradients
        return [
            (piece, gradient)
            for index, pieces in enumerate(self.pieces)
            for piece, gradient in zip(pieces, given.get(index) or (), strict=False)  # padding has no piece
        ]

    def tensors(self) -> list[Tensor]:
        """Returns the gradients of this rank's part, padding too: no rank has none."""
        return [tensor for index in range(len(self.pieces)) for tensor in self._zero.averaged_gradients[index]]

    def call_hooks(self, kind: str) -> None:
        """Calls the hooks that the user's optimizer has for its step: "pre" or "post"."""
        for hook in [*getattr(self._user, f"_optimizer_step_{kind}_hooks").values()]:
            hook(self._user, (self._user,), {})

    def step(self) -> None:
        """Steps this rank's part with the user's rates, and gathers the others' weights."""
        for mine, its in zip(_groups(self._user), self._twin.param_groups, strict=True):
            its.update({key: value for key, value in mine.items() if key != "params"})
        self._zero.step()

    def check(self) -> None:
        """Raises `ConfigError` where weights were put elsewhere, or others are trained than at first."""
        if any(p.data_ptr() != place for p, place in self._places):
            raise ConfigError(
                "parameters cannot be moved or replaced after prepare() with zero=",
                "a parameter's data was replaced after prepare() (p.data = ..., model.to(...))",
                "change weights in place (p.copy_(...), load_state_dict), or prepare() the model again",
            )
        now = [id(p) for group in _groups(self._user) for p in _trained(group)]
        if now != [id(p) for p, _ in self._places]:
            raise ConfigError(
                "trainable parameters cannot change after prepare() with zero=",
                "layers were frozen or unfrozen, or groups were added",
                "prepare() the model again after such a change, or use zero=0",
            )

    # -- state -----------------------------------------------------------------------------------------------
    def share_out(self) -> None:
        """Takes the state from the user's optimizer, this rank's part of it; or leaves all as it is, and raises
        `CheckpointError` if weights of one group have states that one flat tensor cannot have."""
        given = self._user.state
        cuts = self._cut(given)
        for flat, cut in zip(self._flats, cuts, strict=True):
            self._twin.state.pop(flat, None)
            if cut:
                self._twin.state[flat] = cut
        trained = {id(parameter) for parameter, _ in self._places}
        self._others = {parameter: state for parameter, state in given.items() if id(parameter) not in trained}
        self._user.state = StateInParts()

    def check_state(self, content: Mapping[str, Any]) -> None:
        """Raises `CheckpointError` where `share_out` would, for a state dict that is not loaded yet."""
        order = [index for group in content["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self._user.param_groups for parameter in group["params"]]
        if len(order) == len(parameters):  # else it will be refused for that
            self._cut({p: content["state"].get(index, {}) for p, index in zip(parameters, order, strict=True)})

    def _cut(self, given: Mapping[Any, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns this rank's part of a state, by group."""
        found = []
        for parameters, flat, pieces in zip(self.parameters, self._flats, self.pieces, strict=True):
            states = [given.get(parameter, {}) for parameter in parameters]
            keys = list(states[0])
            _check_alike(states, keys)
            cut: dict[str, Any] = {}
            for key in keys:
                values = [state[key] for state in states]
                if key in _COMMON or not isinstance(values[0], Tensor):
                    cut[key] = _common(key, values)
                    continue
                whole = dict(zip(map(id, parameters), values, strict=True))
                its = [_flat(whole[id(piece.parameter)])[piece.start : piece.stop] for piece in pieces]
                padding = values[0].new_zeros(len(flat) - sum(map(len, its)))
                cut[key] = torch.cat([*its, padding])
            found.append(cut)
        return found

    def state_dict(self, *, keep: bool = True) -> dict[str, Any]:
        """Returns the state dict that the user's optimizer would have, were it whole; collective. Ranks that do not
        `keep` it get it without states."""
        hidden, self._user.state = self._user.state, defaultdict(dict, self._others)
        try:
            content = self._user.state_dict()
        finally:
            self._user.state = hidden
        order = [id(parameter) for group in self._user.param_groups for parameter in group["params"]]
        states: dict[int, dict[str, Any]] = {}
        for parameters, flat in zip(self.parameters, self._flats, strict=True):
            for key, value in self._twin.state.get(flat, {}).items():
                if isinstance(value, Tensor) and value.shape == flat.shape:
                    whole, sizes = self._gather(value), [parameter.numel() for parameter in parameters]
                    cut = whole[: sum(sizes)].split(sizes) if keep else ()  # without the padding
                    values = [own.view(p.shape).clone() for own, p in zip(cut, parameters, strict=False)]
                else:
                    values = [value.clone() if isinstance(value, Tensor) else value for _ in parameters]
                for parameter, its in zip(parameters, values, strict=False):
                    states.setdefault(order.index(id(parameter)), {})[key] = its
        return content | {"state": dict(sorted((content["state"] | states).items()))}


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns the groups that train something; not cached, because `load_state_dict` makes new ones."""
    return [group for group in optimizer.param_groups if _trained(group)]


def _trained(group: Mapping[str, Any]) -> list[nn.Parameter]:
    return [parameter for parameter in group["params"] if parameter.requires_grad]


def _pieces(parameters: Sequence[nn.Parameter], start: int, stop: int) -> list[Piece]:
    """Returns the pieces of parameters between two places, with all parameters laid end to end."""
    found, at = [], 0
    for parameter in parameters:
        low, high = max(start - at, 0), min(stop - at, parameter.numel())
        if low < high:
            found.append(Piece(parameter, low, high))
        at += parameter.numel()
    return found


def _flat(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.detach().contiguous().view(-1)


def _check_alike(states: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> None:
    other = next((list(state) for state in states if list(state) != keys), None)
    if other is not None:
        raise _several_states(f"some parameters have {keys or 'no state'}, others have {other or 'no state'}")


def _common(key: str, values: Sequence[Any]) -> Any:
    first = values[0]
    if not all(torch.equal(v, first) if isinstance(first, Tensor) else v == first for v in values):
        shown = sorted({str(v.item() if isinstance(v, Tensor) else v) for v in values})[:3]
        raise _several_states(f"{key} differs between parameters: {shown}")
    return first.clone() if isinstance(first, Tensor) else first


def _several_states(received: str) -> CheckpointError:
    return CheckpointError(
        "all parameters of a group must have the same optimizer state with zero=",
        received,
        "put parameters that began to train later, or skipped updates, into a separate group; or zero=0",
    )


# ---- the user's optimizer, and its twin


def _refuse_state(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise ConfigError(
        "the plain optimizer cannot be used with zero=: its state is split over the ranks",
        "optimizer.state, or a step of the plain optimizer",
        "use state_dict() and load_state_dict() of the prepared optimizer, on every rank;\n"
        "close() of the prepared optimizer returns the state to the plain optimizer",
    )


# what stands in its `state`: any use is refused, as it would change nothing or find nothing
_USES = [
    *("get", "items", "keys", "values", "clear", "pop", "popitem", "setdefault", "update", "copy"),
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__bool__", "__eq__"),
]
StateInParts = type("StateInParts", (dict,), dict.fromkeys(_USES, _refuse_state))


def twin_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns an optimizer of the same settings, without state and hooks, that DeepSpeed may cut into parts; raises
    `ConfigError` for an optimizer that is not known to update each element independently."""
    if type(optimizer) not in _BY_ELEMENT:
        raise ConfigError(
            "the optimizer must update each element from its own gradient and state alone with zero=",
            f"{type(optimizer).__name__}, which is not known to do so",
            f"use zero=0, or an optimizer of torch.optim: {', '.join(kind.__name__ for kind in _BY_ELEMENT)}",
        )
    new: torch.optim.Optimizer = object.__new__(type(optimizer))
    left_out = {"state", "param_groups", "step", *_HOOKS}  # `step`: schedulers put theirs on the instance
    new.__dict__ = {key: copy.copy(value) for key, value in vars(optimizer).items() if key not in left_out}
    for hooks in _HOOKS:
        setattr(new, hooks, OrderedDict())
    new.state = defaultdict(dict)
    new.param_groups = [dict(group) | {"params": _trained(group)} for group in _groups(optimizer)]
    return new


# ---- stage 2: gradients in parts too


class Elsewhere(Tensor):
    """The placeholder in `p.grad` when the ranks have the gradient in parts (zero=2): any use raises ConfigError."""

    @classmethod
    def of(cls, parameter: nn.Parameter) -> Tensor:
        """Returns a placeholder that stores one element, however large the parameter is."""
        return parameter.detach().new_full((), torch.nan).expand(parameter.shape).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "__set__", "__repr__", "is_sparse"):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise ConfigError(
            "with zero=2 no rank has a whole gradient: p.grad cannot be read or changed",
            f"{getattr(func, '__name__', func)} of a gradient, between backward() and step()",
            "prepare(..., clip=1.0) or optimizer.clip_grad_norm_() to clip; zero=1 leaves gradients whole",
        )


class InOrder:
    """Sends gradients, parameters given by group, in one order on every rank, each as soon as it and those before it
    are there.

    DeepSpeed's own hooks send them as they come, which on ranks that use different branches of a model adds up
    mismatched tensors. `send` takes a parameter that has a gradient, and its group; collective once enough have
    come.
    """

    def __init__(self, parameters: Sequence[Sequence[nn.Parameter]], send: Callable[[nn.Parameter, int], None]) -> None:
        every = [(parameter, index) for index, its in enumerate(parameters) for parameter in its]
        self._order = every[::-1]  # about the order in which they come
        self._send = send
        self._next: int | None = None
        self._here: set[int] = set()
        self._handles = [p.register_post_accumulate_grad_hook(self._come) for p, _ in every]

    def begin(self) -> None:
        """The pass that follows completes the gradients."""
        self._next = 0
        self._here.clear()

    def stop(self) -> None:
        self._next = None

    def _come(self, parameter: Tensor) -> None:
        if self._next is None:
            return
        if id(parameter) in self._here:
            raise ConfigError(
                "a parameter cannot get two gradients in one backward pass with zero=2",
                "two gradients for the same parameter (reentrant checkpointing)",
                "checkpoint(..., use_reentrant=False), or zero=1",
            )
        self._here.add(id(parameter))
        while self._next < len(self._order) and id(self._order[self._next][0]) in self._here:
            self._send(*self._order[self._next])
            self._next += 1

    def finish(self) -> list[bool]:
        """Sends the remaining gradients, zeros for missing ones; returns which were present, in `parameters`' order."""
        assert self._next is not None
        used = [id(p) in self._here or p.grad is not None for p, _ in self._order]
        for parameter, group in self._order[self._next :]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._send(parameter, group)
        self.stop()
        return used[::-1]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
