"""What the operations of a model do, seen in one pass over the example: values, draws, changes in place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from hvdtrain.pipeline.trace.code import forgotten
from hvdtrain.pipeline.trace.few import device_of, to_device
from hvdtrain.pipeline.trace.reference import message_of
from hvdtrain.pipeline.trace.restore import all_training, preserved_state
from hvdtrain.pipeline.trace.shadow import executed
from hvdtrain.pipeline.trace.tracer import Program
from hvdtrain.pipeline.values.microbatch import SIMPLE
from hvdtrain.values.generators import of_devices
from hvdtrain.values.nested import tensors_of


@dataclass
class Facts:
    """What was seen."""

    draws: set[fx.Node] = field(default_factory=set)  # nodes that take random numbers
    # nodes that keep the generators' state, to repeat a part in the backward pass (checkpointing)
    repeats: set[fx.Node] = field(default_factory=set)
    # node -> the place (in the order of the graph) of the last operation that changes its value in place
    changed_at: dict[fx.Node, int] = field(default_factory=dict)
    # nodes whose value another stage can be given: tensors, numbers, None, nested tuples of them
    may_cross: set[fx.Node] = field(default_factory=set)
    tensors: dict[fx.Node, int] = field(default_factory=dict)  # node -> how many tensors its value holds
    changed: set[int] = field(default_factory=set)  # ids of buffers that a pass in training mode changes
    # attributes that each pass in training mode changes again
    counts: list[tuple[nn.Module, str]] = field(default_factory=list)


class Different(Exception):
    """A program does not do what its model does."""


def look(program: Program, example: tuple[Any, ...]) -> Facts:
    """Runs the program on a few samples of the example, in both modes where they differ.

    Buffers, random state, training modes and gradients end as they were.

    Raises:
        Different: the program cannot be run.
    """
    facts, model = Facts(), program.model
    device = device_of(model)
    try:
        with preserved_state(model, device), torch.no_grad():
            for training in [True] if program.is_one else [True, False]:
                with all_training(model, training):
                    _Watch(program, program.graphs[training], facts).run(*to_device(example, device))
    except Exception as error:
        raise Different(message_of(error)) from error
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
                value = next(given) if node.op == "placeholder" else executed(node, self._values, self._program.named)
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


def _versions(value: Any) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors_of(value))
