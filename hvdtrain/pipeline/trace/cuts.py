"""Finds where a traced model can be cut, by what its operations do in one pass over the example.

A cut is allowed where at most `MOST_CROSSING` tensors cross, none of them is changed in place afterwards (another stage
works on a copy, or on a leaf of its own graph), and no module whose buffers change (batch norm) is used on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

from hvdtrain.pipeline.trace.code import forgotten
from hvdtrain.pipeline.trace.restore import all_training, device_of, preserved_state, to_device
from hvdtrain.pipeline.trace.shadow import executed
from hvdtrain.pipeline.trace.tracer import Program, message_of
from hvdtrain.pipeline.values.microbatch import SIMPLE
from hvdtrain.private.torch import pytree
from hvdtrain.values.generators import of_devices
from hvdtrain.values.nested import tensors_of


@dataclass
class Facts:
    """The observations of a run."""

    draws: set[fx.Node] = field(default_factory=set)  # nodes that take random numbers
    repeats: set[fx.Node] = field(default_factory=set)  # that keep the generators' state, for checkpointing
    changed_at: dict[fx.Node, int] = field(default_factory=dict)  # node -> place where it is last changed in place
    may_cross: set[fx.Node] = field(default_factory=set)  # that hold tensors, numbers, None, nested tuples of them
    tensors: dict[fx.Node, int] = field(default_factory=dict)  # node -> how many tensors its value holds
    changed: set[int] = field(default_factory=set)  # ids of buffers that a pass in training mode changes
    counts: list[tuple[nn.Module, str]] = field(default_factory=list)  # see `Reference.counts`


class Different(Exception):
    """A program does not do what its model does."""


def look(program: Program, example: tuple[Any, ...]) -> Facts:
    """Runs the program on a few samples, in training mode; raises `Different` if it cannot be run."""
    facts, model = Facts(), program.model
    device = device_of(model)
    try:
        with preserved_state(model, device), torch.no_grad(), all_training(model, True):
            _Watch(program, facts).run(*to_device(example, device))
    except Exception as error:
        raise Different(message_of(error)) from error
    return facts


class _Watch:
    """Runs a graph node by node and compares before and after."""

    def __init__(self, program: Program, facts: Facts) -> None:
        self._program, self._graph, self._facts = program, program.graph, facts
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


MOST_CROSSING = 8  # tensors: some layers into a dense block (DenseNet), where it would be one segment else


@dataclass(frozen=True)
class Cut:
    """A place between two operations."""

    place: int  # the index in the graph of the last operation before it
    values: tuple[fx.Node, ...]  # what crosses


def find_cuts(program: Program, facts: Facts, *, everywhere: bool = False) -> list[Cut]:
    """Returns the first and last place, and between them those allowed, less those that only part off an activation."""
    view = _View(program, facts)
    last = len(view.nodes) - 2
    best: dict[int, Cut] = {}
    total = view.weights[-1]
    for place, node in enumerate(view.nodes[:last]):
        if not node.op.startswith("call") or not (everywhere or view.allows(place)):
            continue
        if everywhere or not total:
            best[place] = Cut(place, tuple(view.crossing(place)))
        elif 0 < view.weights[place] < total:
            best[view.weights[place]] = Cut(place, tuple(view.crossing(place)))
    begin = Cut(len(view.inputs) - 1, tuple(view.inputs))
    return [begin, *best.values(), Cut(last, ())]


class _View:
    """A graph, seen from the places between its nodes."""

    def __init__(self, program: Program, facts: Facts) -> None:
        self.nodes = list(program.graph.nodes)
        self.index = {node: index for index, node in enumerate(self.nodes)}
        self.inputs = [node for node in self.nodes if node.op == "placeholder"]
        self._facts = facts
        self._last = {
            node: max((self.index[user] for user in node.users), default=-1)
            for node in self.nodes
            if node.op != "get_attr"
        }
        self._together = self._spans(program)
        self.weights = self._weights(program)

    def crossing(self, place: int) -> list[fx.Node]:
        """The nodes up to a place that are used after it."""
        return [node for node in self.nodes[: place + 1] if self._last.get(node, -1) > place]

    def allows(self, place: int) -> bool:
        crossing, facts = self.crossing(place), self._facts
        return (
            sum(facts.tensors.get(node, 0) for node in crossing) <= MOST_CROSSING
            and all(node in facts.may_cross and facts.changed_at.get(node, -1) <= place for node in crossing)
            and not any(first <= place < last for first, last in self._together)
        )

    def _spans(self, program: Program) -> list[tuple[int, int]]:
        """Returns the first and last use of each buffer that training changes."""
        uses: dict[int, list[int]] = {}
        for node in self.nodes:
            users: Sequence[fx.Node]
            if node.op == "call_module":
                tensors, users = list(program.named(node.target).buffers()), [node]
            elif node.op == "get_attr":
                tensors, users = [program.named(node.target)], list(node.users)
            else:
                continue
            for tensor in tensors:
                if id(tensor) in self._facts.changed:
                    uses.setdefault(id(tensor), []).extend(self.index[user] for user in users)
        return [(min(places), max(places)) for places in uses.values() if places and min(places) < max(places)]

    def _weights(self, program: Program) -> list[int]:
        """Returns, for each node, how many operations with parameters there are up to it."""
        counts, count = [], 0
        for node in self.nodes:
            if node.op == "call_module":
                count += next(program.named(node.target).parameters(), None) is not None
            else:
                read = (program.named(n.target) for n in node.all_input_nodes if n.op == "get_attr")
                count += any(isinstance(value, nn.Parameter) for value in read)
            counts.append(count)
        return counts
