"""Python functions for stretches of a traced model.

They call the user's own modules and forget a value where it is used last, as the model itself would. (The same idea as
`torch.fx.Graph.python_code`; here modules and functions are bound as globals, which is one dictionary look-up a call
where the model's own attributes are several.)
"""

from __future__ import annotations

import itertools
import linecache
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

_NUMBERS = itertools.count()
_LITERALS = (int, bool, str, bytes, type(None))

# What a call_module or get_attr node stands for in this stretch: an object, and which attribute of it ("": itself).
Binder = Callable[[fx.Node], tuple[Any, str]]
# Where the model was when it was traced, and where this stretch of it is now.
Moved = tuple[torch.device, torch.device]


class _Writer:
    """Names for what a function refers to."""

    def __init__(self, bind: Binder, moved: Moved | None) -> None:
        self._bind, self._moved = bind, moved
        self.globals: dict[str, Any] = {"no_grad": torch.no_grad}
        self._global_of: dict[int, str] = {}
        self._name_of: dict[fx.Node, str] = {}

    def name(self, node: fx.Node) -> str:
        if node not in self._name_of:
            self._name_of[node] = f"v{len(self._name_of)}"
        return self._name_of[node]

    def known(self, value: Any) -> str:
        """The global that is this object."""
        if id(value) not in self._global_of:
            name = self._global_of[id(value)] = f"g{len(self._global_of)}"
            self.globals[name] = value
        return self._global_of[id(value)]

    def call(self, node: fx.Node) -> str:
        """The expression that a node stands for."""
        if node.op == "get_attr":
            value, attribute = self._bind(node)
            if attribute and not attribute.isidentifier():  # of a ParameterList
                return f"{self.known(getattr)}({self.known(value)}, {attribute!r})"
            return f"{self.known(value)}.{attribute}" if attribute else self.known(value)
        given = [self.argument(value) for value in node.args]
        given += [f"{name}={self.argument(value)}" for name, value in node.kwargs.items()]
        if node.op == "call_method":
            return f"{given[0]}.{node.target}({', '.join(given[1:])})"
        called = self._bind(node)[0] if node.op == "call_module" else node.target
        return f"{self.known(called)}({', '.join(given)})"

    def argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.call(value) if value.op == "get_attr" else self.name(value)
        if isinstance(value, tuple) and type(value) in (tuple, torch.Size):
            return f"({''.join(self.argument(item) + ', ' for item in value)})"
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{self.known(type(value))}({', '.join(self.argument(item) for item in value)})"
        if isinstance(value, list):
            return f"[{', '.join(self.argument(item) for item in value)}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self.argument(key)}: {self.argument(item)}' for key, item in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({', '.join(self.argument(item) for item in (value.start, value.stop, value.step))})"
        if type(value) in _LITERALS or (type(value) is float and math.isfinite(value)):
            return repr(value)
        if self._moved is not None and isinstance(value, torch.device) and value == self._moved[0]:
            value = self._moved[1]  # for example next(self.parameters()).device
        return self.known(value)


def function(
    nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node] | Any, bind: Binder,
    *, name: str, is_last: bool, moved: Moved | None = None,
) -> Callable[..., tuple[Any, ...]]:  # fmt: skip
    """Returns a function, for tracebacks called `name`, that does `nodes`, from `inputs` to a tuple of `outputs`.

    If `is_last`, `outputs` is the argument of the graph's output node. A device that the trace has fixed becomes the
    one that the stretch is `moved` to.
    """
    writer = _Writer(bind, moved)
    parameters = [writer.name(node) for node in inputs]
    work = [node for node in nodes if node.op != "get_attr"]
    needed: list[fx.Node] = []
    fx.node.map_arg(tuple(outputs) if isinstance(outputs, (list, tuple)) else (outputs,), needed.append)
    forget = forgotten(work, inputs, needed)
    lines = []
    if unused := [writer.name(node) for node in forget.get(None, ())]:
        lines.append(f"    del {', '.join(unused)}")
    for node in work:
        indent = "    "
        if not node.meta.get("grad", True):
            lines.append("    with no_grad():")
            indent = "        "
        lines.append(f"{indent}{writer.name(node)} = {writer.call(node)}")
        if node in forget:
            lines.append(f"    del {', '.join(writer.name(done) for done in forget[node])}")
    values = [outputs] if is_last else outputs
    lines.append(f"    return ({''.join(writer.argument(value) + ', ' for value in values)})")
    source = f"def stage({', '.join(parameters)}):\n" + "\n".join(lines) + "\n"
    filename = f"<hvdtrain pipeline {next(_NUMBERS)}: {name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)  # for tracebacks
    exec(compile(source, filename, "exec"), writer.globals)
    return writer.globals["stage"]


def forgotten(
    work: Sequence[fx.Node], inputs: Sequence[fx.Node] = (), needed: Collection[fx.Node] = ()
) -> dict[fx.Node | None, list[fx.Node]]:
    """Returns node -> the values that no node needs after it; None -> the inputs that no node needs."""
    last: dict[fx.Node, fx.Node | None] = dict.fromkeys(inputs)
    for node in work:
        last[node] = node
        for used in node.all_input_nodes:
            if used in last:
                last[used] = node
    forget: dict[fx.Node | None, list[fx.Node]] = {}
    for value, after in last.items():
        if value not in needed:
            forget.setdefault(after, []).append(value)
    return forget
