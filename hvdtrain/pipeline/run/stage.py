"""Stages: neighbouring segments as one function, on a device.

A stage uses the user's own modules and parameters, moved to its device in place: their names, and optimizers that hold
them, stay as they are. A parameter that several stages use lives with the first of them; the others have a *proxy* of
it, a leaf of their own whose values are taken over before a step and whose gradient is added to the owner's after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.trace.restore import device_of
from hvdtrain.pipeline.trace.segments import Chain, Segment, Stretch, tensors_used


class Stage(Stretch):
    """A contiguous part of the model on one device; called with a tuple of values, it returns the next stage's.
    `proxies`: (owner, proxy) for each parameter that lives in an earlier stage."""

    def __init__(self, index: int, segments: Sequence[Segment], device: torch.device, owners: _Owners) -> None:
        chain, moved = segments[0].chain, (owners.traced_on, device)
        self._objects = _Objects(chain, index, device, owners)
        super().__init__(chain, segments[0].index, segments[-1].end, self._objects.bind, moved)
        self.index, self.device = index, device
        self.segments = [Segment(chain, segment.index, self._objects.bind, moved) for segment in segments]
        for node in chain.used(self.first, self.end):  # all of them now: proxies are known before the first call
            self._objects.bind(node)
        self.proxies = self._objects.proxies
        self._changing = list(self._changing_now())

    def __call__(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.function(*values)

    def changing_buffers(self) -> list[Tensor]:
        """Returns the stage's buffers that a training pass changes, as the example's did: not masks and tables."""
        found = {id(buffer): buffer for owner, name in self._changing if (buffer := owner._buffers[name]) is not None}
        return list(found.values())

    def _changing_now(self) -> Iterator[tuple[nn.Module, str]]:
        """Yields changing buffers by owner and name, because a forward may put another tensor there."""
        owners = dict.fromkeys(self.modules())
        for node in self.chain.used(self.first, self.end):
            if node.op == "get_attr" and node.target not in self.chain.program.attributes:
                owners[self.chain.program.bind(node)[0]] = None
        used = {id(buffer) for buffer in self.buffers()}
        for owner in owners:
            for name, buffer in owner._buffers.items():
                if id(buffer) in used and id(buffer) in self.chain.facts.changed:
                    yield owner, name

    def refresh(self) -> None:
        """Takes over the values of what other stages own; before a step."""
        self._objects.refresh()

    def return_gradients(self) -> None:
        """Adds the proxies' gradients to their owners'; after a step."""
        for owner, proxy in self.proxies:
            if proxy.grad is None:
                continue
            gradient = proxy.grad.to(owner.device)
            if owner.grad is None:
                owner.grad = gradient
            else:
                owner.grad.add_(gradient)
            proxy.grad = None

    def __repr__(self) -> str:
        return f"<stage {self.index}: {self.name} on {self.device}>"


class _Owners:
    """The stage that each tensor lives with: the first that uses it."""

    def __init__(self, chain: Chain, ends: Sequence[int]) -> None:
        self.stage: dict[int, int] = {}
        self.traced_on = device_of(chain.program.model)
        begin = 0
        for index, end in enumerate(ends):
            for tensor in tensors_used(chain, begin, end, chain.program.bind):
                owner = self.stage.setdefault(id(tensor), index)
                if owner != index and id(tensor) in chain.facts.changed:
                    raise ConfigError(
                        "a module whose buffers change in training cannot be used by two stages",
                        f"stages {owner + 1} and {index + 1} share one (used in segments up to {end - 1})",
                        "another balance=[...], which does not cut between its uses",
                    )
            begin = end


class _Objects:
    """The modules and parameters that a stage uses: the model's own, or twins with proxies in them."""

    _copies_all = False

    def __init__(self, chain: Chain, index: int, device: torch.device, owners: _Owners) -> None:
        self._program, self._index, self._device, self._owners = chain.program, index, device, owners
        self.proxies: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []  # of buffers: (owner's, ours)
        self._tensors: dict[int, Tensor] = {}
        self._twins: dict[nn.Module, nn.Module] = {}

    def bind(self, node: fx.Node) -> tuple[Any, str]:
        value = self._program.named(node.target)
        if node.op == "call_module":
            return self._module(value), ""
        if node.target in self._program.attributes and isinstance(value, Tensor):
            return self._constant(value), ""
        if not isinstance(value, Tensor) or self._is_mine(value):
            return self._program.bind(node)
        return self._tensor(value), ""

    def _is_mine(self, tensor: Tensor) -> bool:
        mine = self._owners.stage.get(id(tensor), self._index) == self._index
        return mine or (not isinstance(tensor, nn.Parameter) and tensor.device == self._device)

    def _tensor(self, tensor: Tensor) -> Tensor:
        """Ours for a tensor that lives with another stage."""
        if id(tensor) not in self._tensors:
            if isinstance(tensor, nn.Parameter):
                ours: Tensor = nn.Parameter(tensor.detach().to(self._device), requires_grad=tensor.requires_grad)
                self.proxies.append((tensor, ours))  # type: ignore[arg-type]
            else:
                ours = tensor.detach().to(self._device)
                self._copies.append((tensor, ours))
            self._tensors[id(tensor)] = ours
        return self._tensors[id(tensor)]

    def _constant(self, tensor: Tensor) -> Tensor:
        """A tensor that the model's forward refers to; one that was where the model was comes along."""
        if id(tensor) not in self._tensors:
            moves = tensor.device == self._owners.traced_on
            self._tensors[id(tensor)] = tensor.to(self._device) if moves else tensor
        return self._tensors[id(tensor)]

    def _module(self, module: nn.Module) -> nn.Module:
        if module in self._twins:
            return self._twins[module]
        tensors = [*module.parameters(), *module.buffers()]
        if all(self._is_mine(tensor) for tensor in tensors) and not (self._copies_all and _is_bound(module)):
            for part in module.modules():
                self._carry(part)
            return module
        twin = self._twins[module] = object.__new__(module.__class__)
        twin.__dict__.update(_attributes(module, twin))
        for kind in ("_parameters", "_buffers"):
            named = module.__dict__[kind]
            mine = {name: t if t is None or self._is_mine(t) else self._tensor(t) for name, t in named.items()}
            twin.__dict__[kind] = mine
        children = {name: child and self._module(child) for name, child in module._modules.items()}
        twin.__dict__["_modules"] = children
        self._carry(twin)
        if isinstance(twin, nn.RNNBase):
            twin._flat_weights = [getattr(twin, name) for name in twin._flat_weights_names]
        return twin

    def _carry(self, module: nn.Module) -> None:
        """Moves what else a module that is called keeps on the model's device: plain tensors, and the device itself."""
        for name, value in vars(module).items() if self._device != self._owners.traced_on else ():
            if isinstance(value, Tensor) and value.device == self._owners.traced_on:
                module.__dict__[name] = value.to(self._device)
            elif isinstance(value, torch.device) and value == self._owners.traced_on:
                module.__dict__[name] = self._device

    def refresh(self) -> None:
        for owner, proxy in self.proxies:
            if owner._backward_hooks:
                raise ConfigError(
                    "a parameter of several stages cannot have a hook, which would see only part of its gradient",
                    f"a tensor hook on a parameter of shape {tuple(owner.shape)}",
                    "change p.grad after the step; or a balance=[...] that leaves its uses in one stage",
                )
            if proxy.device != owner.device:
                proxy.data.copy_(owner.data, non_blocking=True)
            elif proxy.data_ptr() != owner.data_ptr():  # on one device both are one memory
                proxy.data = owner.data
            proxy.requires_grad_(owner.requires_grad)
        for owner_buffer, ours in self._copies:
            ours.data.copy_(owner_buffer.data)
        for module, twin in self._twins.items():
            twin.__dict__.update((name, value) for name, value in _attributes(module, twin) if name not in _OWN)
            self._carry(twin)


def _attributes(module: nn.Module, twin: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's attributes for its twin; its own methods among them become the twin's."""
    for name, value in module.__dict__.items():
        is_own = isinstance(value, MethodType) and value.__self__ is module
        yield name, MethodType(value.__func__, twin) if is_own else value


def _is_bound(module: nn.Module) -> bool:
    """Returns True if plain attributes of a module belong to a device."""
    return any(isinstance(value, (Tensor, torch.device)) for part in module.modules() for value in vars(part).values())


# what a twin has of its own
_OWN = ("_parameters", "_buffers", "_modules", "_flat_weights")


class Copies(_Objects):
    """A copy of everything on another device, to measure there; the model stays where it is."""

    _copies_all = True

    def __init__(self, chain: Chain, device: torch.device) -> None:
        super().__init__(chain, -1, device, _Owners(chain, []))

    def _is_mine(self, tensor: Tensor) -> bool:
        return False

    def tensors(self) -> Iterator[Tensor]:
        """Returns an iterator over all copies that were made."""
        return iter(self._tensors.values())


def build_stages(
    model: nn.Module, segments: Sequence[Segment], sizes: Sequence[int], devices: Sequence[torch.device | str]
) -> list[Stage]:
    """Cuts a chain into stages and moves the model's tensors in place, each to its stage's device; or raises
    `ConfigError`."""
    assert sum(sizes) == len(segments) and len(sizes) == len(devices) and min(sizes) > 0
    chain = segments[0].chain
    assert model is chain.program.model
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    owners = _Owners(chain, ends)
    places = [torch.device(device) for device in devices]
    _place(model, chain, owners, places)
    begin, stages = 0, []
    for index, (end, device) in enumerate(zip(ends, places, strict=True)):
        stages.append(Stage(index, segments[begin:end], device, owners))
        begin = end
    return stages


def _place(model: nn.Module, chain: Chain, owners: _Owners, places: Sequence[torch.device]) -> None:
    """Moves every tensor of the model to its stage's device; what no stage uses goes with the first."""
    for tensor in (*model.parameters(), *model.buffers()):
        device = places[owners.stage.get(id(tensor), 0)]
        if tensor.device != device:
            tensor.data = tensor.data.to(device)
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.to(device)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
