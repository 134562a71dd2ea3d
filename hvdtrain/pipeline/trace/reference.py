"""What a model itself does with an example: its outputs in both modes, and what its passes leave behind."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.trace.recording import users_line
from hvdtrain.pipeline.trace.restore import (
    a_few,
    all_training,
    attributes_of,
    changes,
    copied,
    device_of,
    preserved_state,
    to_device,
)
from hvdtrain.pipeline.trace.tracer import Program, is_torchs, message_of
from hvdtrain.pipeline.values.microbatch import SIMPLE
from hvdtrain.private.torch import pytree
from hvdtrain.values.nested import map_tensors, tensors_of


@dataclass
class Reference:
    """The observations of the model's own passes."""

    example: tuple[Any, ...]  # the arguments, of a few samples, or all for a model that does not take fewer
    outputs: dict[bool, Any] = field(default_factory=dict)  # by training mode
    counts: list[tuple[nn.Module, str]] = field(default_factory=list)  # attributes that each training pass changes
    keepers: set[str] = field(default_factory=set)  # paths of modules that put tensors into objects outside of it
    layers: dict[str, float] = field(default_factory=dict)  # by path: with weights, that a call of a module calls


def refer(program: Program, example: tuple[Any, ...]) -> Reference:
    """Calls the model itself, in both modes; it ends as it was. Raises `ConfigError` for an example that it does not
    take, an assigned buffer, outputs that cannot be cut or joined, or a kept tensor with its graph."""
    reference = Reference(_first_calls(program, example))
    for training in (True, False):
        with all_training(program.model, training):
            _look(program, training, reference)
    return reference


def _first_calls(program: Program, example: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns as many samples as the model takes; what it keeps for later calls (tables) holds no stand-ins then."""
    model, device = program.model, device_of(program.model)
    buffers = [(path, module, dict(module._buffers)) for path, module in model.named_modules()]
    assigned: list[str] = []
    for arguments in (a_few(example), example):  # a model may want batches of a certain size
        try:
            for training in (True, False):
                with all_training(model, training), preserved_state(model, device), torch.no_grad():
                    program.call(to_device(arguments, device))
                    assigned += [
                        f"{path}.{name}".lstrip(".")
                        for path, module, held in buffers
                        for name, buffer in module._buffers.items()
                        if buffer is not held.get(name)
                    ]
            if assigned:
                break
            return arguments
        except Exception as error:
            failed = error
    if assigned:
        raise ConfigError(
            "a model that is split must change its buffers in place",
            f"{', '.join(dict.fromkeys(assigned))}: assigned in a forward pass",
            "self.buffer.copy_(value) in place of self.buffer = value",
        )
    raise ConfigError(
        "the model must accept the example",
        f"{message_of(failed)} (in a pass under torch.no_grad(), as in evaluation)",
        "an example like the batches of training: shapes, types, devices; a tuple for several arguments",
    ) from failed


def _look(program: Program, training: bool, reference: Reference) -> None:
    model, device = program.model, device_of(program.model)

    def call() -> Any:
        return program.call(to_device(reference.example, device))

    graphs = _Graphs()
    with preserved_state(model, device), torch.set_grad_enabled(training), graphs:
        before = attributes_of(model)
        reference.outputs[training] = map_tensors(torch.detach, call())
        changed = [(module, name, copied(value)) for module, name, value in changes(before)]
        _refuse_graphs(model, changed)
    strange = [
        leaf for leaf in pytree.tree_leaves(reference.outputs[training]) if not isinstance(leaf, (Tensor, *SIMPLE))
    ]
    if strange:
        raise ConfigError(
            "a split model must return tensors, numbers and None, in tuples, lists and dicts",
            f"a {type(strange[0]).__name__} among its outputs",
            "remove it from the outputs; for transformers' caches: use_cache=False in kwargs=, or in the\n"
            "config that the model is built with",
        )
    if training:
        reference.counts = _counting(model, changed, call)
    changed.clear()  # what the model held is gone now
    graphs.refuse()
    watched = _Watched(model)
    with preserved_state(model, device), torch.no_grad():
        watched.run(call)
    reference.keepers |= watched.keepers()  # now that the model's own attributes are as before
    if training:
        reference.layers = watched.layers()


def _refuse_graphs(model: nn.Module, changed: Sequence[tuple[nn.Module, str, Any]]) -> None:
    """Refuses what a forward leaves on its module to be differentiated: the next micro-batch would put its own there,
    and the graph belongs to another stage than the loss that reads it."""
    paths = {module: path for path, module in model.named_modules()}
    for module, name, value in changed:
        computed = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}  # weight_norm's weight
        if name in computed:
            continue
        if any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in pytree.tree_leaves(value)):
            raise ConfigError(
                "a forward pass cannot keep a tensor with a graph in an attribute of a module",
                f"forward leaves a tensor with a graph in {f'{paths[module]}.{name}'.lstrip('.')}: the loss would read"
                " that of another micro-batch",
                f"return it with the outputs; or, only to look at it, keep {name}.detach()",
            )


class _Graphs(torch.autograd.graph.saved_tensors_hooks):
    """Refuses a pass whose graph outlives it in an object that is no part of the model."""

    def __init__(self) -> None:
        self._saved: list[tuple[weakref.ref[_Saved], str]] = []  # with the line that computed
        super().__init__(self._save, lambda saved: saved.tensor)

    def _save(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor.detach())  # not itself: an output would keep its own graph
        self._saved.append((weakref.ref(saved), users_line()))
        return saved

    def refuse(self) -> None:
        if any(saved() is not None for saved, _ in self._saved):
            gc.collect()  # a circle of objects keeps nothing for long
        lines = [line for saved, line in self._saved if saved() is not None]
        if lines:
            raise ConfigError(
                "a tensor with a graph must leave the model through its outputs",
                f"an object outside of the model keeps a tensor with its graph, computed at {lines[-1]};\n"
                "a loss that uses that tensor would read the one of another micro-batch",
                "return it with the outputs; or, only to look at it, keep it detached: tensor.detach()",
            )


@dataclass(eq=False)
class _Saved:
    """A tensor that a graph keeps for its backward pass."""

    tensor: Tensor


class _Watched(TorchFunctionMode):
    """A pass: how many layers each module calls, and which tensors outlive it in objects outside of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._paths = {module: path for path, module in model.named_modules()}
        self._running = [""]
        self._calls, self._layers = Counter[str](), Counter[str]()
        self._made: list[tuple[weakref.ref[Tensor], str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs))}
        self._made += [(weakref.ref(one), self._running[-1]) for one in tensors_of(result) if id(one) not in given]
        return result

    def run(self, act: Callable[[], Any]) -> None:
        """Runs a pass, which must be without gradients: graphs hold tensors."""
        call = nn.Module.__call__

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._running.append(self._paths.get(module, self._running[-1]))
            self._calls[self._running[-1]] += module in self._paths
            for path in set(self._running):
                self._layers[path] += _weights(module)
            try:
                result = call(module, *args, **kwargs)
            finally:
                self._running.pop()
            # objects of the caller's own: is it the caller who keeps them, or the module?
            return map_tensors(lambda t: t.view_as(t) if t.requires_grad else t.detach(), result)

        # only where there may be compiled parts: the import takes seconds
        eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
        with eager, mock.patch.object(nn.Module, "__call__", called), self:
            act()

    def layers(self) -> dict[str, float]:
        """Returns the layers that one call of a module calls, by its path."""
        return {path: self._layers[path] / count for path, count in self._calls.items()}

    def keepers(self) -> set[str]:
        """Returns the paths of modules that keep tensors."""
        if any(tensor() is not None for tensor, _ in self._made):
            gc.collect()  # a circle of objects keeps nothing for long
        return {path for tensor, path in self._made if tensor() is not None}


def _weights(module: nn.Module) -> int:
    """Returns how many weights a module uses itself; of PyTorch's own layers all count as one."""
    own = sum(weight is not None for weight in module._parameters.values())
    if is_torchs(module):
        return min(own, 1)
    lists = (child for child in module.children() if isinstance(child, (nn.ParameterList, nn.ParameterDict)))
    return own + sum(1 for one in lists for _ in one.parameters())


def _counting(
    model: nn.Module, changed: Sequence[tuple[nn.Module, str, Any]], call: Callable[[], Any]
) -> list[tuple[nn.Module, str]]:
    """Returns attributes that a second pass changes again: counts, means over passes. Warns of containers."""
    if not changed:
        return []
    with preserved_state(model, device_of(model)), torch.no_grad():
        for module, name, value in changed:
            module.__dict__[name] = copied(value)
        with all_training(model, True):
            call()
        found = [(module, name) for module, name, value in changed if not same(module.__dict__.get(name), value)]
    counts = [(module, name) for module, name in found if copied(kept := module.__dict__.get(name)) is kept]
    paths = {module: path for path, module in model.named_modules()}
    if names := ", ".join(f"{paths[module]}.{name}" for module, name in found if (module, name) not in counts):
        warnings.warn(f"in a pipeline each micro-batch adds to what forward passes collect: {names}", stacklevel=6)
    return counts


def same(a: Any, b: Any) -> bool:
    """Returns True if two outputs are equal, but for what the order of additions does."""
    (one, how), (other, also) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return how == also and all(_same_leaf(x, y) for x, y in zip(one, other, strict=True))


def _same_leaf(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return x is y or bool(np.all(x == y))
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return bool(x.allclose(y, rtol=1e-3, atol=1e-5, equal_nan=True)) if x.is_floating_point() else bool(x.equal(y))
