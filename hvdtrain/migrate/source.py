"""A script as LibCST reads it: what each name means, where it stands, and which statements follow one another."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import libcst as cst
from libcst import metadata

Statement: TypeAlias = "cst.SimpleStatementLine | cst.BaseCompoundStatement"
_BLANK = cst.Module([])


@dataclass(frozen=True, order=True)
class Finding:
    """What is said of a line: a reason why it is not moved, or a note on what was."""

    line: int
    text: str


def code(node: cst.CSTNode) -> str:
    """The node as it is written."""
    return _BLANK.code_for_node(node)


def tail(node: cst.CSTNode) -> str:
    """The last identifier of a name: `optimizer` of `self.optimizer`; "" of what is no name."""
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else ""


def is_chain(node: cst.CSTNode) -> bool:
    """Whether it is a name with attributes, and no call among them."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return isinstance(node, cst.Name)


def literal(node: cst.CSTNode | None) -> str:
    return "" if node is None else code(node).strip()


class Source:
    """One script.

    Attributes:
        module: its syntax tree; the nodes that all else speaks of are of this one.
    """

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
        """What a name stands for, `horovod.torch.rank`, whatever it was imported as; "" where that is not known."""
        found = self.meanings(node)
        return next(iter(found)) if len(found) == 1 else ""

    def meanings(self, node: cst.CSTNode) -> set[str]:
        """All that a name may stand for: several, where it is assigned in several places."""
        if not is_chain(node):
            return set()
        known: Any = self._names.get(node)
        known = known() if callable(known) else known
        return {name.name for name in known or () if name.source.name != "BUILTIN"}

    def scope(self, node: cst.CSTNode) -> metadata.Scope | None:
        """The scope that the node is in."""
        for one in (node, *self.above(node)):
            if isinstance(found := self._scopes.get(one), metadata.Scope):
                return found
        return None

    def statement(self, node: cst.CSTNode) -> Statement | None:
        """The statement, in a block of lines, that the node is in; None in `if x: y()` on one line."""
        for one in (node, *self.above(node)):
            if isinstance(self._parents.get(one), (cst.IndentedBlock, cst.Module)) and isinstance(
                one, (cst.SimpleStatementLine, cst.BaseCompoundStatement)
            ):
                return one
            if isinstance(one, cst.SimpleStatementSuite):
                return None
        return None

    def block(self, statement: cst.CSTNode) -> list[Any]:
        """The statements among which one stands."""
        found = self._parents.get(statement)
        return list(found.body) if isinstance(found, (cst.IndentedBlock, cst.Module)) else []

    def function(self, node: cst.CSTNode) -> cst.FunctionDef | cst.Module:
        """The function that the node is in, or the module."""
        return next(one for one in self.above(node) if isinstance(one, (cst.FunctionDef, cst.Module)))

    def names(self) -> set[str]:
        """Every identifier of the script."""
        return {node.value for node in walk(self.module) if isinstance(node, cst.Name)}

    def variables(self) -> set[str]:
        """The same without those of attributes."""
        found = (node for node in walk(self.module) if isinstance(node, cst.Name))
        return {
            node.value for node in found if not (isinstance(up := self.parent(node), cst.Attribute) and up.attr is node)
        }


@functools.cache
def children(node: cst.CSTNode) -> Sequence[cst.CSTNode]:
    """A node's own; LibCST visits it anew each time that it is asked. `convert` empties the cache."""
    return node.children


def walk(node: cst.CSTNode, into: Callable[[cst.CSTNode], bool] = lambda node: True) -> Iterator[cst.CSTNode]:
    """Yields a node and all below it, as written; not what is below nodes that `into` refuses."""
    yield node
    if into(node):
        for child in children(node):
            yield from walk(child, into)


def runs_later(node: cst.CSTNode) -> bool:
    """Whether what is in it does not run where it stands."""
    return isinstance(node, (cst.FunctionDef, cst.ClassDef, cst.Lambda))


def calls(node: cst.CSTNode, *, now: bool = False) -> Iterator[cst.Call]:
    """Yields the calls in a node; with `now` those only that run where it stands."""
    keep = (lambda one: not runs_later(one)) if now else (lambda one: True)
    yield from (one for one in walk(node, keep) if isinstance(one, cst.Call))


# -- which variables may hold the same object: assigned, handed to functions, returned by them -----------------------
# where a name is assigned, and the name; attributes are told apart by their last name only
Variable: TypeAlias = tuple[Any, str]
# methods of a module that return it
_SETTINGS = ("args", "opt", "opts", "options", "config", "cfg", "flags", "FLAGS", "hparams")  # args.model is a name
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
            return (None, code(node) if code(node.value) in _SETTINGS else tail(node))
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
        elif isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute) and tail(value.func) in SAME:
            self._note(known, value.func.value, site)
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
    """Returns a call's arguments by the name of their parameter; None where they cannot be told (`*args`)."""
    parameters = signatures[function].split(" *")[0].split()
    found: dict[str, cst.BaseExpression] = {}
    for place, arg in enumerate(call.args):
        if arg.star or (arg.keyword is None and place >= len(parameters)):
            return None
        found[parameters[place] if arg.keyword is None else arg.keyword.value] = arg.value
    return found
