"""Which variables of a script may hold the same object: assigned, handed to functions, returned by them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import libcst as cst

from hvdtrain.migrate.source import Source, calls, code, is_chain, tail, walk

# where a name is assigned, and the name; attributes are told apart by their last name only
Variable: TypeAlias = tuple[Any, str]
# methods of a module that return it
_SAME = ("to", "cuda", "cpu", "half", "float", "double", "train", "eval", "apply", "requires_grad_")


@dataclass(frozen=True, eq=False)
class Giver:
    """What a variable is given somewhere.

    Attributes:
        variable: another one; None for anything else.
        site: the node that gives it.
    """

    variable: Variable | None
    site: cst.CSTNode


class Flow:
    """The variables of a script.

    Attributes:
        uses: the nodes that name each.
        givers: what each is given.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.functions: dict[str, list[cst.FunctionDef]] = defaultdict(list)
        for node in walk(source.module):
            if isinstance(node, cst.FunctionDef):
                self.functions[self._name(node)].append(node)
        self.uses: dict[Variable, list[cst.CSTNode]] = defaultdict(list)
        self.givers: dict[Variable, list[Giver]] = defaultdict(list)
        for node in walk(source.module):
            if isinstance(node, cst.Return) and node.value is not None:
                self._return(node, node.value)
            if isinstance(node, (cst.Name, cst.Attribute)) and (known := self.variable(node)) is not None:
                self.uses[known].append(node)
            for target, value in _assigned(node):
                self._give(target, value, node)
            if isinstance(node, cst.Call):
                self._hand(node)

    def variable(self, node: cst.CSTNode | None) -> Variable | None:
        """The variable that a node names; None of a keyword, a method that is called, or a name of a module's."""
        if not isinstance(node, (cst.Name, cst.Attribute)) or not is_chain(node):
            return None
        outer = self._source.parent(node)
        if isinstance(node, cst.Attribute):
            return (None, tail(node))
        if isinstance(outer, cst.Attribute) and outer.attr is node:
            return None
        if isinstance(outer, (cst.Arg, cst.NameItem)) and getattr(outer, "keyword", None) is node:
            return None
        if isinstance(outer, (cst.FunctionDef, cst.ClassDef, cst.ImportAlias, cst.AsName)):
            return None
        scope = self._source.scope(node)
        found = {one.scope for one in scope[node.value]} if scope is not None else set()
        return (next(iter(found)), node.value) if len(found) == 1 else None

    def called(self, call: cst.Call) -> list[cst.FunctionDef]:
        """The script's functions that a call may be of."""
        if self._source.qualified(call.func).startswith(("torch.", "horovod.")):
            return []
        return self.functions.get(_name_of(call), [])

    def reached(self, nodes: Iterable[cst.CSTNode]) -> set[str]:
        """The names of functions that are called in some nodes, and in those functions."""
        found: set[str] = set()
        waiting = [_name_of(call) for node in nodes for call in calls(node)]
        while waiting:
            name = waiting.pop()
            if name in self.functions and name not in found:
                found.add(name)
                waiting += [_name_of(call) for one in self.functions[name] for call in calls(one.body)]
        return found

    def _class(self, function: cst.FunctionDef) -> cst.ClassDef | None:
        block = self._source.parent(function)
        found = self._source.parent(block) if block is not None else None
        return found if isinstance(found, cst.ClassDef) else None

    def _name(self, function: cst.FunctionDef) -> str:
        """What calls of it have: `f`; `.f` of a method; the class, where it makes one."""
        owner = self._class(function)
        if owner is not None and function.name.value == "__init__":
            return owner.name.value
        return function.name.value if owner is None else f".{function.name.value}"

    def _give(self, target: cst.CSTNode, value: cst.CSTNode | None, site: cst.CSTNode) -> None:
        if isinstance(target, (cst.Tuple, cst.List)):
            parts: list[Any] = [None] * len(target.elements)
            if isinstance(value, (cst.Tuple, cst.List)) and len(value.elements) == len(parts):
                parts = [one.value for one in value.elements]
            for place, element in enumerate(target.elements):
                if isinstance(value, cst.Call):
                    self._give_returned(element.value, value, place, site)
                else:
                    self._give(element.value, parts[place], site)
            return
        known = self.variable(target)
        if known is None or (isinstance(value, cst.Name) and value.value == "None"):
            return
        if isinstance(value, cst.IfExp):
            self._give(target, value.body, site)
            self._give(target, value.orelse, site)
        elif isinstance(value, cst.Call):
            self._give_returned(target, value, -1, site)
        else:
            self.givers[known].append(Giver(self.variable(value), site))

    def _give_returned(self, target: cst.CSTNode, call: cst.Call, place: int, site: cst.CSTNode) -> None:
        if isinstance(call.func, cst.Attribute) and tail(call.func) in _SAME and place < 0:
            return self._give(target, call.func.value, site)
        functions = [one for one in self.called(call) if one.name.value != "__init__"]
        known = self.variable(target)
        if known is not None:
            self.givers[known] += [Giver((function, str(place)), site) for function in functions] or [Giver(None, site)]
        return None

    def _return(self, node: cst.Return, value: cst.BaseExpression) -> None:
        """What a function returns is a variable, too: named by its place in a tuple, -1 for the whole."""
        function = self._source.function(node)
        parts = [one.value for one in value.elements] if isinstance(value, cst.Tuple) else []
        for place, part in [(-1, value), *enumerate(parts)]:
            self.givers[function, str(place)].append(Giver(self.variable(part), node))

    def _hand(self, call: cst.Call) -> None:
        """Arguments of a call are given to the parameters of the script's functions."""
        for function in self.called(call):
            names = [one.name for one in (*function.params.posonly_params, *function.params.params)]
            if self._class(function) is not None and not any(
                code(one.decorator) == "staticmethod" for one in function.decorators
            ):
                names = names[1:]
            by_name = {name.value: name for name in (*names, *(one.name for one in function.params.kwonly_params))}
            given: dict[str, cst.BaseExpression | None] = dict.fromkeys(by_name)
            for place, arg in enumerate(call.args):
                if arg.keyword is not None:
                    given[arg.keyword.value] = arg.value
                elif not arg.star and place < len(names):
                    given[names[place].value] = arg.value
            for name, value in given.items():
                if name in by_name:
                    self._give(by_name[name], value, call)


def _assigned(node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode | None]]:
    if isinstance(node, cst.Assign):
        yield from ((target.target, node.value) for target in node.targets)
    elif isinstance(node, (cst.AnnAssign, cst.NamedExpr)):
        yield node.target, node.value
    elif isinstance(node, (cst.For, cst.CompFor, cst.AugAssign)):
        yield node.target, None
    elif isinstance(node, cst.AsName):
        yield node.name, None


def _name_of(call: cst.Call) -> str:
    return f".{tail(call.func)}" if isinstance(call.func, cst.Attribute) else tail(call.func)
