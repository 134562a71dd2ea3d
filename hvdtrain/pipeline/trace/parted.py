"""A backward pass in two: gradients of what came in at once, those of the weights later (Qi et al., arXiv 2401.10241).

A node of autograd's graph computes only those gradients that are asked for. The first pass asks for those of the
inputs; every node on its way from which a weight can be reached by another way is a *junction*, and what arrives there
is kept. The second pass starts at the junctions, with what arrived, and asks for those of the weights. (The same idea
as `torch.distributed.pipelining`'s, which groups what lies between by parameters.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

Node = Any  # of autograd's graph


def inputs_first(
    roots: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Callable[[], None]]:
    """Gives `inputs`, leaves, their gradients; returns calls, each to be made once, in any order, that add up those of
    all other leaves; they hold the graph. `gradients`: of the roots; None: 1."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    nodes = [get_gradient_edge(root).node for root in roots]
    graph = _Graph(nodes, [get_gradient_edge(tensor).node for tensor in wanted])
    if not any(node in graph.on_the_way for node in nodes):
        return [partial(torch.autograd.backward, list(roots), list(gradients))]
    groups, at_once = graph.groups([node for node in nodes if node not in graph.on_the_way])
    arrived: dict[Node, Any] = {}
    hooks = [node.register_prehook(partial(arrived.__setitem__, node)) for group in groups for node in group]
    now = [*wanted, *(node.variable for node in at_once)]
    try:
        torch.autograd.backward(list(roots), list(gradients), inputs=now, retain_graph=True)
    finally:
        for hook in hooks:
            hook.remove()
    return [
        partial(_backward, [(node, arrived.get(node, ())) for node in group], leaves)
        for group, leaves in groups.items()
    ]


def _backward(group: Sequence[tuple[Node, Sequence[Tensor | None]]], leaves: Sequence[Node]) -> None:
    edges = [(GradientEdge(node, at), one) for node, its in group for at, one in enumerate(its) if one is not None]
    if edges:
        starts, given = [edge for edge, _ in edges], [one for _, one in edges]
        torch.autograd.backward(starts, given, inputs=[leaf.variable for leaf in leaves])


class _Graph:
    """The nodes that lead from the roots to the inputs (`on_the_way`), and those that branch off."""

    def __init__(self, roots: Iterable[Node], inputs: Iterable[Node]) -> None:
        self._inputs = set(inputs)
        self.on_the_way: set[Node] = set(self._inputs)
        self._order = list(_children_first(roots))
        for node in self._order:
            if any(child in self.on_the_way for child in _children(node)):
                self.on_the_way.add(node)
        self._leaves: dict[Node, frozenset[Node]] = {}  # of nodes that are not on the way

    def groups(self, aside: Sequence[Node]) -> tuple[dict[tuple[Node, ...], list[Node]], list[Node]]:
        """Returns junctions that share a weight, or what leads to one, with their weights' nodes; and weights that are
        better taken at once: of junctions of which one leads to another (the weight is used twice in a row), and of
        `aside`, roots that lead to no input."""
        beside: dict[Node | None, set[Node]] = {None: set(_children_first(aside))}  # junction -> what branches off
        for node in self._order:
            branches = {child for child in _children(node) if child not in self.on_the_way}
            found = set(_children_first(branches)) if node in self.on_the_way and branches else set()
            if any(hasattr(one, "variable") for one in found):
                beside[node] = found
        groups: list[tuple[list[Node], set[Node]]] = []
        for junction, found in beside.items():
            joined = [group for group in groups if group[1] & found]
            groups = [group for group in groups if not group[1] & found]
            its = [one for nodes, _ in joined for one in nodes] + [junction]
            groups.append((its, found.union(*(one for _, one in joined))))
        later: dict[tuple[Node, ...], list[Node]] = {}
        at_once: list[Node] = []
        for nodes, found in groups:
            leaves = [one for one in found if hasattr(one, "variable")]
            if None in nodes or (len(nodes) > 1 and self._in_a_row(nodes)):
                at_once += leaves
            else:
                later[tuple(nodes)] = leaves
        return later, at_once

    def _in_a_row(self, nodes: Sequence[Node]) -> bool:
        below = {child for node in nodes for child in _children(node) if child in self.on_the_way}
        return bool(set(_children_first(below)) & set(nodes))


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _children_first(roots: Iterable[Node]) -> Iterable[Node]:
    """Yields every node that is reached, each once, after those that it leads to."""
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots if root is not None]
    while stack:
        node, left = stack.pop()
        if left:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child in _children(node) if child not in seen]
