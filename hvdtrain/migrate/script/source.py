"""Reads a script with LibCST: what each name means, where it stands, and which statements follow one another."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard, TypeVar

import libcst as cst
from libcst import metadata

Statement: TypeAlias = "cst.SimpleStatementLine | cst.BaseCompoundStatement"
Node = TypeVar("Node", bound=cst.CSTNode)
_BLANK = cst.Module([])


@dataclass(frozen=True, order=True)
class LineNote:
    """A reason why a line is not converted, or a note on one that is."""

    line: int
    text: str


def code(node: cst.CSTNode) -> str:
    """Returns a node's text."""
    return _BLANK.code_for_node(node)


def tail(node: cst.CSTNode) -> str:
    """Returns the last identifier of a name: `optimizer` of `self.optimizer`; "" if the node is no name."""
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else ""


def is_chain(node: cst.CSTNode | None) -> TypeGuard[cst.Name | cst.Attribute]:
    """Returns True for a name, with or without attributes, that no call is part of."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return isinstance(node, cst.Name)


def owner_of(node: cst.CSTNode | None, *methods: str) -> cst.BaseExpression | None:
    """Returns the owner of a method that is called: `loss` of `loss.backward()`; None if another one is."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value in methods:
        return node.func.value
    return None


def literal(node: cst.CSTNode | None) -> str:
    return "" if node is None else code(node).strip()


class Script:
    """A script: its syntax tree `module`, and what is known of its nodes."""

    def __init__(self, text: str) -> None:
        wrapper = metadata.MetadataWrapper(cst.parse_module(text))
        self.module = wrapper.module
        self._positions = wrapper.resolve(metadata.PositionProvider)
        self._parents = wrapper.resolve(metadata.ParentNodeProvider)
        self._names = wrapper.resolve(metadata.QualifiedNameProvider)
        self._scopes = wrapper.resolve(metadata.ScopeProvider)

    def line(self, node: cst.CSTNode) -> int:
        return self._positions[node].start.line

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        return self._parents.get(node)

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yields what the node is in, the nearest first."""
        found = self._parents.get(node)
        while found is not None:
            yield found
            found = self._parents.get(found)

    def qualified(self, node: cst.CSTNode) -> str:
        """Returns what a name stands for, `horovod.torch.rank`, however it was imported; "" if that is not known."""
        found = self.meanings(node)
        return next(iter(found)) if len(found) == 1 else ""

    def meanings(self, node: cst.CSTNode) -> set[str]:
        """Returns all that a name may stand for: several if it is assigned in several places."""
        if not is_chain(node):
            return set()
        known: Any = self._names.get(node)
        known = known() if callable(known) else known
        return {name.name for name in known or () if name.source.name != "BUILTIN"}

    def scope(self, node: cst.CSTNode) -> metadata.Scope | None:
        """Returns the scope that the node is in."""
        for one in (node, *self.above(node)):
            if isinstance(found := self._scopes.get(one), metadata.Scope):
                return found
        return None

    def statement(self, node: cst.CSTNode) -> Statement | None:
        """Returns the statement, in a block of lines, that the node is in; None in `if x: y()` on one line."""
        for one in (node, *self.above(node)):
            if isinstance(self._parents.get(one), (cst.IndentedBlock, cst.Module)) and isinstance(
                one, (cst.SimpleStatementLine, cst.BaseCompoundStatement)
            ):
                return one
            if isinstance(one, cst.SimpleStatementSuite):
                return None
        return None

    def block(self, statement: cst.CSTNode) -> list[Any]:
        """Returns the statements among which one stands."""
        found = self._parents.get(statement)
        return list(found.body) if isinstance(found, (cst.IndentedBlock, cst.Module)) else []

    def function(self, node: cst.CSTNode) -> cst.FunctionDef | cst.Module:
        """Returns the function that the node is in, or the module."""
        return next(one for one in self.above(node) if isinstance(one, (cst.FunctionDef, cst.Module)))

    def names(self) -> set[str]:
        """Returns every identifier of the script."""
        return {name.value for name in find(self.module, cst.Name)}

    def mentions(self, node: cst.CSTNode, name: str) -> bool:
        """Returns True if something in a node stands for a name, as of `qualified`."""
        return any(self.qualified(one) == name for one in walk(node))

    def is_above(self, node: cst.CSTNode, other: cst.CSTNode) -> bool:
        """Returns True if a node stands above another one, in the same function."""
        return self.line(node) < self.line(other) and self.function(node) is self.function(other)


@functools.cache
def children(node: cst.CSTNode) -> Sequence[cst.CSTNode]:
    """Returns a node's children; LibCST visits the node each time. `convert` empties the cache."""
    return node.children


def walk(node: cst.CSTNode, into: Callable[[cst.CSTNode], bool] = lambda node: True) -> Iterator[cst.CSTNode]:
    """Yields a node and all below it, as written; not what is below nodes that `into` refuses."""
    yield node
    if into(node):
        for child in children(node):
            yield from walk(child, into)


def find(node: cst.CSTNode, kind: type[Node]) -> Iterator[Node]:
    """Yields the nodes of one kind in a node."""
    return (one for one in walk(node) if isinstance(one, kind))


def calls(node: cst.CSTNode, *, now: bool = False) -> Iterator[cst.Call]:
    """Yields the calls in a node; with `now` those only that run where it stands."""
    later = (cst.FunctionDef, cst.ClassDef, cst.Lambda) if now else ()
    return (one for one in walk(node, lambda one: not isinstance(one, later)) if isinstance(one, cst.Call))


# The parameters of Horovod's functions (0.28.1), in their order.
_REDUCE = "average name compression op prescale_factor postscale_factor process_set"
_REDUCE_IN_PLACE = "average name op prescale_factor postscale_factor process_set"
SIGNATURES = {
    "allreduce": f"tensor {_REDUCE}",
    "allreduce_": f"tensor {_REDUCE_IN_PLACE}",
    "grouped_allreduce": f"tensors {_REDUCE}",
    "grouped_allreduce_": f"tensors {_REDUCE_IN_PLACE}",
    "allgather": "tensor name process_set",
    "broadcast": "tensor root_rank name process_set",
    "broadcast_": "tensor root_rank name process_set",
    "broadcast_parameters": "params root_rank process_set",
    "broadcast_optimizer_state": "optimizer root_rank model process_set",
    "broadcast_object": "obj root_rank name process_set",
    "allgather_object": "obj name process_set",
    "DistributedOptimizer": "optimizer named_parameters compression backward_passes_per_step op"
    " gradient_predivide_factor num_groups groups sparse_as_dense process_set",
    "init": "comm process_sets",
    "barrier": "process_set",
}
_WITHOUT = ("rank", "size", "local_rank", "local_size", "shutdown", "is_initialized")
SIGNATURES |= dict.fromkeys(_WITHOUT, "")


# The same of Horovod's Keras; `*`: what follows is of the newer versions of one of the two modules, by name only.
KERAS_SIGNATURES = {
    "DistributedOptimizer": "optimizer name device_dense device_sparse compression sparse_as_dense"
    " gradient_predivide_factor op * backward_passes_per_step average_aggregated_gradients num_groups groups"
    " process_set scale_local_gradients",
    "load_model": "filepath custom_optimizers custom_objects compression * legacy_opts",
    "allreduce": "value name average prescale_factor postscale_factor op compression",
    "broadcast": "value root_rank name",
    "callbacks.BroadcastGlobalVariablesCallback": "root_rank device local_variables",
    "callbacks.MetricAverageCallback": "device",
    **{name: SIGNATURES[name] for name in ("init", "barrier", "broadcast_object", "allgather_object", *_WITHOUT)},
}


def bind(
    call: cst.Call, function: str, signatures: Mapping[str, str] = SIGNATURES
) -> dict[str, cst.BaseExpression] | None:
    """Returns a call's arguments by the name of their parameter; None if they are not known (`*args`)."""
    parameters = signatures[function].split(" *")[0].split()
    found: dict[str, cst.BaseExpression] = {}
    for place, arg in enumerate(call.args):
        if arg.star or (arg.keyword is None and place >= len(parameters)):
            return None
        found[parameters[place] if arg.keyword is None else arg.keyword.value] = arg.value
    return found
