"""Names in a script of Keras: whose each is, where it gets the value that it has somewhere, and who gets that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import libcst as cst

from hvdtrain.migrate.script.plan import Rewrite, own_nodes, target_of
from hvdtrain.migrate.script.source import Script, code, is_chain, tail, walk


def home(source: Script, name: cst.CSTNode) -> object:
    """Whose variable a name is: a scope, for `self.name` a class; None: of several, or of none here."""
    base = name
    while isinstance(base, cst.Attribute):
        base = base.value
    if base is not name and tail(base) == "self":
        return next((one for one in source.above(name) if isinstance(one, cst.ClassDef)), None)
    return source.home(base) if isinstance(base, cst.Name) else None


def uses_of(source: Script, name: cst.CSTNode) -> list[cst.CSTNode]:
    """Where a variable stands, also where it is assigned to."""
    its, text = home(source, name), code(name)
    return [
        node
        for node in walk(source.module)
        if tail(node) == tail(name)
        and is_chain(node)
        and code(node) == text
        and not isinstance(source.parent(node), (cst.Param, cst.Nonlocal, cst.Global, cst.NameItem))
        and not (isinstance(outer := source.parent(node), cst.Attribute) and outer.attr is node)
        and not (isinstance(outer, cst.Arg) and outer.keyword is node)
        and home(source, node) is its
    ]


def binds(source: Script, node: cst.CSTNode) -> bool:
    """Whether a name is given a value where it stands."""
    outer = source.parent(node)
    while isinstance(outer, (cst.Element, cst.StarredElement, cst.Tuple, cst.List)):
        node, outer = outer, source.parent(outer)
    if isinstance(outer, (cst.AssignTarget, cst.AsName, cst.Del)):
        return True
    return isinstance(outer, (cst.For, cst.CompFor, cst.NamedExpr, cst.AnnAssign)) and outer.target is node


def value_of(source: Script, target: cst.CSTNode) -> cst.BaseExpression | None:
    """What is assigned to a name, where it alone is assigned to."""
    found, value = target_of(source.statement(target))
    return value if found is target else None


def reaching(source: Script, name: cst.CSTNode, at: cst.CSTNode) -> list[cst.CSTNode | None]:
    """Where the value that a name has at a node may have been given to it, the nearest first; None: somewhere else."""
    bound = [node for node in uses_of(source, name) if binds(source, node)]
    function = source.function(at)
    if bound and all(source.function(one) is not function for one in bound):
        last = source.function(bound[-1])  # of another function: what it has at its end
        if any(source.function(one) is not last for one in bound):
            return [None, *bound]
        body = last.body.body if isinstance(last, cst.FunctionDef) else last.body
        return _before(source, bound, list(body))[0]
    found: list[cst.CSTNode | None] = []
    one: cst.CSTNode | None = at
    while one is not None and one is not function:
        block = source.block(one)
        more, certain = _before(source, bound, block[: block.index(one)] if one in block else [])
        found += [node for node in more if node not in found]
        if certain:
            return found
        if isinstance(one, (cst.For, cst.While)):
            found += [node for node in bound if node not in found and one in source.above(node)]
        one = source.parent(one)
    return [*found, None]


def _before(source: Script, bound: list[cst.CSTNode], block: Sequence[Any]) -> tuple[list[Any], bool]:
    """Where statements in a row may give a name its value, and whether they do in any case."""
    found: list[Any] = []
    for statement in reversed(block):
        inside = [node for node in bound if statement in source.above(node)]
        found += inside
        if inside and _always(source, inside, statement):
            return found, True
    return found, False


def _always(source: Script, bound: Sequence[cst.CSTNode], statement: cst.CSTNode) -> bool:
    if isinstance(statement, cst.If):
        branches = [statement.body, statement.orelse]
        return all(one is not None and _always(source, bound, one) for one in branches)
    if isinstance(statement, (cst.IndentedBlock, cst.Else, cst.With)):
        inner = statement.body if isinstance(statement, cst.IndentedBlock) else [statement.body]
        return any(_always(source, bound, one) for one in inner)
    return isinstance(statement, cst.SimpleStatementLine) and any(statement in source.above(one) for one in bound)


def for_many(plan: Rewrite, node: cst.CSTNode, other: cst.CSTNode) -> bool:
    """Whether what keeps a node from running, and not another, is nothing but `if hvd.size() > 1:`."""
    source = plan.source
    shared, below = list(source.above(other)), node
    for one in source.above(node):
        if one in shared or isinstance(one, cst.FunctionDef):
            break
        if isinstance(one, (cst.If, cst.For, cst.While, cst.Try, cst.Match, cst.IfExp, cst.BooleanOperation)):
            test = one.test if isinstance(one, cst.If) and one.body is below else None
            size = test.left if isinstance(test, cst.Comparison) and isinstance(test.left, cst.Call) else None
            if size is None or test is None or source.qualified(size.func) != plan.prefix + "size":
                return False
            if not code(test).replace(" ", "").endswith(("()>1", "()>=2", "()!=1")):
                return False
        below = one
    return True


def of_callers(
    source: Script, node: cst.CSTNode, follow: Callable[[cst.Call], list[cst.Call] | None]
) -> list[cst.Call] | None:
    """What is found at all calls of the function that returns a node; None where they, or what it returns, or what
    becomes of it, cannot be told."""
    function = source.function(node)
    if not isinstance(function, cst.FunctionDef) or source.parent(function) is not source.module:
        return None
    returns = [one for one in own_nodes(function) if isinstance(one, (cst.Return, cst.Yield))]
    uses = [one for one in uses_of(source, function.name) if one is not function.name]
    calling = [call for one in uses if isinstance(call := source.parent(one), cst.Call) and call.func is one]
    if len(returns) != 1 or len(calling) != len(uses):
        return None
    found = [follow(call) for call in calling]
    return None if None in found else [one for some in found for one in some or ()]
