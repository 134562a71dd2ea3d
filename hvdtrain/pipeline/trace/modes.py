"""A model traced in training and in evaluation mode: which modules do different things."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn


@dataclass
class Call:
    """A call of a module: its own operations in order, with calls of other modules among them."""

    path: str
    items: list[Any] = field(default_factory=list)


def opened(call: Call) -> set[str]:
    """Paths of the modules that were followed inside a call."""
    inner = [item for item in call.items if isinstance(item, Call)]
    return {item.path for item in inner}.union(*(opened(item) for item in inner))


def key(node: fx.Node) -> Any:
    target: Any = node.target
    if isinstance(target, nn.Module):  # made again in each run
        target = repr(target)
    elif not isinstance(target, str):  # and so are bound methods (`Function.apply`)
        target = getattr(target, "__name__", ""), id(getattr(target, "__self__", None) or target)
    return (node.op, target, node.meta["grad"], skeleton(node.args), skeleton(node.kwargs))


def skeleton(value: Any) -> str:
    """Arguments as text, every traced value the same."""
    stand_in: Any = Any
    return repr(fx.node.map_arg(value, lambda node: stand_in))


def dependent(training: Call, evaluation: Call) -> set[str]:
    """Paths of the modules that do different things themselves in the two modes."""

    def kind(item: Any) -> Any:
        return ("call", item.path) if isinstance(item, Call) else item

    a, b = training.items, evaluation.items
    if [kind(item) for item in a] != [kind(item) for item in b]:
        return {training.path}
    found: set[str] = set()
    calls = [[item for item in items if isinstance(item, Call)] for items in (a, b)]
    for path in {call.path for call in calls[0]}:
        ours, theirs = ([call for call in side if call.path == path] for side in calls)
        for one, other in zip(ours, theirs, strict=False):
            found |= dependent(one, other)
    return found


def differently_wired(training: fx.Graph, evaluation: fx.Graph) -> set[str]:
    """The module whose operations are the same in both modes, but not what they work on."""
    for a, b in zip(training.nodes, evaluation.nodes, strict=True):
        if (a.name, repr(a.args), repr(a.kwargs)) != (b.name, repr(b.args), repr(b.kwargs)):
            return {a.meta["path"]}
    return set()
