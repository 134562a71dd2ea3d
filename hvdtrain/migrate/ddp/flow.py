"""Where objects and control go in a script: which variables may hold the same object (assigned, handed to functions,
returned by them), and what may have happened last on the ways to a node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import libcst as cst

from hvdtrain.migrate.script.source import Script, calls, code, find, is_chain, owner_of, tail, walk
from hvdtrain.migrate.script.torch_calls import without_gradients

# where a name is assigned, and the name; attributes are told apart by their last name only
Variable: TypeAlias = tuple[Any, str]
# whose attributes are told apart by their whole name: args.model is no model
_SETTINGS = ("args", "opt", "opts", "options", "config", "cfg", "flags", "FLAGS", "hparams")
# methods of a module that return it
SAME = ("to", "cuda", "cpu", "half", "float", "double", "train", "eval", "apply", "requires_grad_")


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

    def __init__(self, source: Script) -> None:
        self._source = source
        self.functions: dict[str, list[cst.FunctionDef]] = defaultdict(list)
        for function in find(source.module, cst.FunctionDef):
            self.functions[self._name(function)].append(function)
        self.uses: dict[Variable, list[cst.CSTNode]] = defaultdict(list)
        self.givers: dict[Variable, list[Giver]] = defaultdict(list)
        for node in walk(source.module):
            if isinstance(node, cst.Return) and node.value is not None:
                self._return(node, node.value)
            if (known := self.variable(node)) is not None:
                self.uses[known].append(node)
            for target, value in _assigned(node):
                self._give(target, value, node)
            if isinstance(node, cst.Call):
                self._hand(node)

    def variable(self, node: cst.CSTNode | None) -> Variable | None:
        """The variable that a node names; None of a keyword, a method that is called, or a name of a module's."""
        if not is_chain(node):
            return None
        outer = self._source.parent(node)
        if isinstance(node, cst.Attribute):
            return (None, code(node) if code(node.value) in _SETTINGS else tail(node))
        if isinstance(outer, cst.Attribute) and outer.attr is node:
            return None
        if isinstance(outer, (cst.Arg, cst.NameItem)) and getattr(outer, "keyword", None) is node:
            return None
        if isinstance(outer, (cst.FunctionDef, cst.ClassDef, cst.ImportAlias, cst.AsName)):
            return None
        home = self._source.home(node)
        return None if home is None else (home, node.value)

    def called(self, call: cst.Call) -> list[cst.FunctionDef]:
        """The script's functions that a call may be of."""
        if self._source.qualified(call.func).startswith(("torch.", "horovod.")):
            return []
        return self.functions.get(_name_of(call), [])

    def reached(self, nodes: Iterable[cst.CSTNode], *, surely: bool = False) -> set[str]:
        """The names of functions that are called in some nodes, and in those functions.

        Args:
            nodes: where to look.
            surely: leaves out methods of what may be of another class.
        """

        def named(node: cst.CSTNode) -> list[str]:
            return [_name_of(call) for call in calls(node) if not surely or _is_the_scripts(call)]

        found: set[str] = set()
        waiting = [name for node in nodes for name in named(node)]
        while waiting:
            name = waiting.pop()
            if name in self.functions and name not in found:
                found.add(name)
                waiting += [called for one in self.functions[name] for called in named(one.body)]
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
                one = self.variable(element.value)
                if isinstance(value, cst.Call) and one is not None:
                    self._note_returned(one, value, place, site)
                else:
                    self._give(element.value, parts[place], site)
            return
        known = self.variable(target)
        if known is not None:
            self._note(known, value, site)

    def _note(self, known: Variable, value: cst.CSTNode | None, site: cst.CSTNode) -> None:
        """Notes what a variable is given, by all ways."""
        if isinstance(value, cst.Name) and value.value == "None":
            return
        if isinstance(value, cst.IfExp):
            self._note(known, value.body, site)
            self._note(known, value.orelse, site)
        elif (same := owner_of(value, *SAME)) is not None:
            self._note(known, same, site)
        elif isinstance(value, cst.Call):
            self._note_returned(known, value, -1, site)
        else:
            self.givers[known].append(Giver(self.variable(value), site))

    def _note_returned(self, known: Variable, call: cst.Call, place: int, site: cst.CSTNode) -> None:
        functions = [one for one in self.called(call) if one.name.value != "__init__"]
        self.givers[known] += [Giver((function, str(place)), site) for function in functions] or [Giver(None, site)]

    def _return(self, node: cst.Return, value: cst.BaseExpression) -> None:
        """What a function returns is a variable, too: named by its place in a tuple, -1 for the whole."""
        function = self._source.function(node)
        parts = [one.value for one in value.elements] if isinstance(value, cst.Tuple) else []
        for place, part in [(-1, value), *enumerate(parts)]:
            self._note((function, str(place)), part, node)

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


def _is_the_scripts(call: cst.Call) -> bool:
    return not isinstance(call.func, cst.Attribute) or code(call.func.value) in ("self", "cls")


def _name_of(call: cst.Call) -> str:
    return f".{tail(call.func)}" if isinstance(call.func, cst.Attribute) else tail(call.func)


# -- what happened last on the ways to a node -----------------------------------------------------------------------
_LEAVES = (cst.Return, cst.Raise, cst.Continue, cst.Break)
_BLOCKS = (cst.SimpleStatementLine, cst.SimpleStatementSuite, cst.IndentedBlock, cst.Module)
_NOBODYS = "?"  # of a function that nothing here calls


class Paths:
    """What may have happened last on the ways to a node, back to the beginning of its loop; "" for nothing."""

    def __init__(self, source: Script, flow: Flow, event: Callable[[cst.Call], str]) -> None:
        self._source, self._flow, self._event = source, flow, event
        self._known: dict[cst.FunctionDef, set[str]] = {}

    def before(self, node: cst.CSTNode, within: cst.CSTNode | None = None) -> set[str]:
        """Goes back from a node; not out of the function `within`."""
        found = self._calls(one for one in calls(node, now=True) if one is not node)
        at, up = node, self._source.parent(node)
        while "" in found and up is not None:
            if isinstance(up, _BLOCKS):
                body: list[Any] = list(up.body)
                found = _behind(found, self._block(body[: next(i for i, one in enumerate(body) if one is at)]))
            elif isinstance(up, (cst.For, cst.While)) and at is up.body:
                return found
            elif isinstance(up, cst.With) and at is up.body:
                found = _behind(found, self._calls(one for item in up.items for one in calls(item)))
            elif isinstance(up, cst.FunctionDef):
                return found if up is within else _behind(found, self._callers(up))
            elif isinstance(up, cst.Lambda):
                return found
            at, up = up, self._source.parent(up)
        return found

    def _callers(self, function: cst.FunctionDef) -> set[str]:
        sites = [call for call in calls(self._source.module) if function in self._flow.called(call)]
        if not sites:
            return {""} if any(map(self._event, calls(function.body))) else {_NOBODYS}
        if function in self._known:
            return self._known[function]
        self._known[function] = {""}  # one that calls itself
        found = set().union(*(self.before(site) for site in sites))
        del self._known[function]
        return found

    def _calls(self, found: Iterable[cst.Call]) -> set[str]:
        last = {""}
        for call in reversed(list(found)):
            if "" in last:
                word = self._event(call)
                last = _behind(last, {word} if word else self._called(call))
        return last

    def _called(self, call: cst.Call) -> set[str]:
        functions = [] if without_gradients(self._source, call) else self._flow.called(call)
        return set().union(*map(self._function, functions)) if functions else {""}

    def _function(self, function: cst.FunctionDef) -> set[str]:
        """What has happened last when it returns."""
        if function not in self._known:
            self._known[function] = {""}
            ends = [node for node in find(function.body, cst.Return) if self._source.function(node) is function]
            found = self._of(function.body).union(*(self.before(node, function) for node in ends))
            del self._known[function]
            return found
        return self._known[function]

    def _block(self, statements: Sequence[cst.CSTNode]) -> set[str]:
        found = {""}
        for one in reversed(statements):
            if "" not in found:
                break
            found = _behind(found, self._of(one))
        return found

    def _of(self, node: cst.CSTNode) -> set[str]:
        if isinstance(node, _BLOCKS):
            return self._block(list(node.body))
        if isinstance(node, _LEAVES):
            return set()
        if isinstance(node, cst.If):
            found = self._of(node.body) | (self._of(node.orelse) if node.orelse is not None else {""})
            return _behind(found, self._calls(calls(node.test, now=True)))
        if isinstance(node, (cst.For, cst.While)):  # which are taken to turn once at least
            return self._of(node.body) or {""}
        if isinstance(node, cst.With):
            return _behind(self._of(node.body), self._calls(one for item in node.items for one in calls(item)))
        if isinstance(node, (cst.Else, cst.Try)):
            return self._of(node.body)
        return self._calls(calls(node, now=True))


def _behind(later: set[str], earlier: set[str]) -> set[str]:
    return (later - {""}) | earlier if "" in later else later
