"""What the operations of a model do, seen in one pass over the example: values, draws, changes in place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.trace.code import forgotten
from hvdtrain.pipeline.trace.few import a_few, device_of, to_device
from hvdtrain.pipeline.trace.restore import all_training, preserved_state
from hvdtrain.pipeline.trace.tracer import Program
from hvdtrain.pipeline.values.microbatch import SIMPLE
from hvdtrain.values.generators import of_devices
from hvdtrain.values.nested import tensors_of


@dataclass
class Facts:
    """What was seen.

    Attributes:
        example: with what: a few samples.
        draws: nodes that take random numbers.
        repeats: nodes that keep the generators' state, to repeat a part in the backward pass (checkpointing).
        changed_at: node -> the place (in the order of the graph) of the last operation that changes its value in place.
        may_cross: nodes whose value another stage can be given: tensors, numbers, None, nested tuples of them.
        tensors: node -> how many tensors its value holds.
        changed: ids of buffers that a pass in training mode changes.
        counts: attributes that each pass in training mode changes again.
    """

    example: tuple[Any, ...]
    draws: set[fx.Node] = field(default_factory=set)
    repeats: set[fx.Node] = field(default_factory=set)
    changed_at: dict[fx.Node, int] = field(default_factory=dict)
    may_cross: set[fx.Node] = field(default_factory=set)
    tensors: dict[fx.Node, int] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)
    counts: list[tuple[nn.Module, str]] = field(default_factory=list)


class Different(Exception):
    """A program does not do what its model does."""


def run_once(program: Program, example: tuple[Any, ...]) -> None:
    """Calls the model itself, before it is traced: what it keeps for later calls (tables, `lru_cache`) holds tensors
    then, and no stand-ins.

    Raises:
        ConfigError: the model does not take the example, or assigns a buffer.
    """
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
            return
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
        message_of(failed),
        "an example like the batches of training: shapes, types, devices; a tuple for several arguments",
    ) from failed


def look(program: Program, example: tuple[Any, ...]) -> Facts:
    """Runs the program on a few samples of the example, in both modes where they differ.

    Buffers, random state, training modes and gradients end as they were.

    Raises:
        Different: the program cannot be run.
    """
    try:
        return _look(program, a_few(example))
    except Exception as error:
        first = error
    try:  # a model may want batches of a certain size
        return _look(program, example)
    except Exception:
        raise Different(message_of(first)) from first


def message_of(error: BaseException) -> str:
    """Returns the type of an error and the beginning of what it says."""
    return f"{type(error).__name__}: {str(error).strip()[:600]}"


def _look(program: Program, example: tuple[Any, ...]) -> Facts:
    facts = Facts(example)
    model = program.model
    device = device_of(model)
    modes = [True] if program.is_one else [True, False]
    with preserved_state(model, device), torch.no_grad():
        for training in modes:
            with all_training(model, training):
                values = to_device(example, device)
                _Watch(program, program.graphs[training], facts).run(*values)
    return facts


class _Watch:
    """Runs a graph node by node and compares before and after."""

    def __init__(self, program: Program, graph: fx.Graph, facts: Facts) -> None:
        self._program, self._graph, self._facts = program, graph, facts
        self._values: dict[fx.Node, Any] = {}
        self._versions: dict[fx.Node, tuple[int, ...]] = {}
        self._generators = of_devices(device_of(program.model))

    def run(self, *inputs: Any) -> None:
        given, last = iter(inputs), forgotten(list(self._graph.nodes))
        # by value as well: batch norm's own function does not count its changes of the running statistics
        buffers = [(b, b._version, b.clone()) for b in self._program.model.buffers()]
        state = self._generators.get()
        for place, node in enumerate(self._graph.nodes):
            if node.op == "output":
                break
            with mock.patch.object(torch, "get_rng_state", wraps=torch.get_rng_state) as asked:
                value = next(given) if node.op == "placeholder" else self._call(node)
            if asked.called:
                self._facts.repeats.add(node)
            now = self._generators.get()
            if not all(map(torch.equal, now, state)):
                self._facts.draws.add(node)
                state = now
            self._see(node, value, place)
            for done in last.get(node, ()):
                self._values.pop(done, None)
                self._versions.pop(done, None)
        kept = {id(b) for b in self._program.model.buffers()}
        self._facts.changed |= {
            id(buffer)
            for buffer, version, value in buffers
            if id(buffer) not in kept or buffer._version != version or not torch.equal(buffer, value)
        }

    def _call(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self._program.named(node.target)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._values.__getitem__)
        args, kwargs = plain(args), plain(kwargs)
        with torch.no_grad():
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            called: Any = self._program.named(node.target) if node.op == "call_module" else node.target
            return called(*args, **kwargs)

    def _see(self, node: fx.Node, value: Any, place: int) -> None:
        facts = self._facts
        for other, before in self._versions.items():
            if _versions(self._values[other]) != before:
                facts.changed_at[other] = place
                self._versions[other] = _versions(self._values[other])
        facts.tensors[node] = len(tensors_of(value))
        leaves = pytree.tree_leaves(value)
        # a device is another one in the next stage
        if all(isinstance(leaf, (Tensor, *SIMPLE)) and not isinstance(leaf, torch.device) for leaf in leaves):
            facts.may_cross.add(node)
        self._values[node], self._versions[node] = value, _versions(value)


def plain(value: Any) -> Any:
    """fx's immutable lists and dicts as ordinary ones."""
    if isinstance(value, fx.immutable_collections.immutable_list):
        return [plain(item) for item in value]
    if isinstance(value, fx.immutable_collections.immutable_dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    if type(value) is tuple:
        return tuple(plain(item) for item in value)
    return value


def _versions(value: Any) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors_of(value))
