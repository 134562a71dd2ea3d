"""Collects what becomes of each node of a script, and writes the new script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import metadata

from hvdtrain.migrate.script.source import (
    KERAS_SIGNATURES,
    SIGNATURES,
    LineNote,
    Script,
    Statement,
    bind,
    calls,
    children,
    code,
    is_chain,
    walk,
)

SETS_REASON = "process sets: hvdtrain trains one model on all ranks"
Expression = Callable[[Any], cst.BaseExpression]
Statements = Callable[[Any], Sequence[Any]]


@dataclass
class Rewrite:
    """The changes of one script."""

    source: Script  # the script
    module: str = "horovod.torch"  # the module of Horovod that the script trains with
    # makes what takes a node's place, from the node with the changes within it
    expressions: dict[cst.CSTNode, Expression] = field(default_factory=dict)
    # the same of a statement in a block: several, or none
    statements: dict[cst.CSTNode, Statements] = field(default_factory=dict)
    refused: set[LineNote] = field(default_factory=set)  # what cannot be converted
    notes: set[LineNote] = field(default_factory=set)  # what to know of converted lines
    needs: set[str] = field(default_factory=set)  # the names that the new script uses: modules, functions, the world
    world_scope: metadata.Scope | None = None  # the scope where `world` is assigned; None: nowhere
    _settled: set[cst.CSTNode] = field(default_factory=set)

    @property
    def prefix(self) -> str:
        """Returns the first part of Horovod's names in this script."""
        return f"{self.module}."

    @property
    def framework(self) -> str:
        return "torch" if self.module == "horovod.torch" else "keras"

    @property
    def signatures(self) -> Mapping[str, str]:
        """Returns the parameters of Horovod's functions, by the names of these."""
        return SIGNATURES if self.framework == "torch" else KERAS_SIGNATURES

    def bind(self, call: cst.Call, name: str) -> dict[str, cst.BaseExpression]:
        """Returns the known arguments of a call of Horovod's function `name`."""
        return bind(call, name, self.signatures) or {}

    def calls(self, name: str) -> list[cst.Call]:
        """Returns the calls of Horovod's function `name`."""
        return [call for call in calls(self.source.module) if self.source.qualified(call.func) == self.prefix + name]

    def refuse(self, node: cst.CSTNode, reason: str) -> None:
        self.refused.add(LineNote(self.source.line(node), reason))

    def note(self, node: cst.CSTNode, text: str) -> None:
        self.notes.add(LineNote(self.source.line(node), text))

    def settle(self, node: cst.CSTNode | None) -> None:
        """Marks the names in a node as handled."""
        if node is not None:
            self._settled.add(node)
            for child in children(node):
                self.settle(child)

    def is_settled(self, node: cst.CSTNode) -> bool:
        return node in self._settled

    def replace(self, node: cst.CSTNode, text: str | Callable[[Any], str]) -> None:
        """Puts an expression in a node's place: its text, or what makes it from the node with its changes."""

        def written(updated: Any) -> cst.BaseExpression:
            found = cst.parse_expression(text if isinstance(text, str) else text(updated))
            parentheses = {name: getattr(updated, name) for name in ("lpar", "rpar") if getattr(updated, name, ())}
            return found.with_changes(**parentheses) if parentheses and not getattr(found, "lpar", ()) else found

        self.expressions[node] = written

    def rewrite(self, statement: Statement, texts: Sequence[str] | Callable[[Any], Sequence[str]]) -> None:
        """Puts statements in a statement's place: their texts, or what makes these from it; none: it is removed."""

        def written(updated: Any) -> Sequence[Any]:
            made: list[Any] = [self._parsed(text) for text in (texts(updated) if callable(texts) else texts)]
            if made:
                kept: dict[str, Any] = {"leading_lines": updated.leading_lines}
                if len(made) == 1 and all(isinstance(one, cst.SimpleStatementLine) for one in (updated, made[0])):
                    kept["trailing_whitespace"] = updated.trailing_whitespace
                made[0] = made[0].with_changes(**kept)
            return made

        self.statements[statement] = written

    def then(self, statement: Statement, texts: Sequence[str]) -> None:
        """Puts statements behind a statement, whatever else changes it."""
        made = [self._parsed(text) for text in texts]
        before = self.statements.get(statement, lambda updated: [updated])
        self.statements[statement] = lambda updated: [*before(updated), *made]

    def _parsed(self, text: str) -> Any:
        return cst.parse_statement(text, self.source.module.config_for_parsing)

    def remove(self, statement: Statement) -> None:
        self.rewrite(statement, [])

    def apply(self) -> str:
        """Returns the new script."""
        changed = self.source.module.visit(_Rewriter(self))
        assert isinstance(changed, cst.Module)
        return changed.code


class _Rewriter(cst.CSTTransformer):
    def __init__(self, plan: Rewrite) -> None:
        super().__init__()
        self._plan = plan

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        change = self._plan.expressions.get(original_node)
        if change is not None:
            return change(updated_node)
        if isinstance(original_node, (cst.Module, cst.IndentedBlock)):
            return self._block(original_node, updated_node)
        return updated_node

    def _block(self, original: Any, updated: Any) -> Any:
        body: list[Any] = []
        waiting: list[cst.EmptyLine] = []
        for before, after in zip(original.body, updated.body, strict=True):
            change = self._plan.statements.get(before)
            made = [after] if change is None else list(change(after))
            if not made:  # comments above it stay, unless they are about Horovod
                waiting = [*waiting, *(line for line in after.leading_lines if "horovod" not in code(line).lower())]
                continue
            above = made[0].leading_lines
            is_blank = bool(above) and not above[0].comment
            while waiting and not waiting[-1].comment and (len(waiting) > 1 or is_blank):
                waiting.pop()
            if waiting:
                made[0] = made[0].with_changes(leading_lines=[*waiting, *above])
                waiting = []
            body += made
        return updated.with_changes(body=body)


def arguments_of(plan: Rewrite, call: cst.Call, name: str) -> dict[str, cst.BaseExpression] | None:
    """Returns a call's arguments; None, and refuses the call, if they are not known, or are for some ranks only."""
    found = bind(call, name, plan.signatures)
    if found is None or set(found) - set(plan.signatures[name].split()):
        plan.refuse(call, f"the arguments of hvd.{name} are not known")
        return None
    sets = found.get("process_set")
    plan.settle(sets)
    if sets is not None and plan.source.qualified(sets) != plan.prefix + "global_process_set":
        plan.refuse(call, SETS_REASON)
        return None
    return found


def statement_of(plan: Rewrite, call: cst.CSTNode, what: str) -> cst.SimpleStatementLine | None:
    """Returns the line that a call is alone on; None, and refuses it, if it is a part of something else."""
    source = plan.source
    found = source.statement(call)
    parent = source.parent(call)
    if isinstance(found, cst.SimpleStatementLine) and len(found.body) == 1 and isinstance(parent, cst.Expr):
        return found
    plan.refuse(call, f"{what} must be a line of its own, whose result is not used")
    return None


def condition_above(source: Script, node: cst.CSTNode) -> cst.CSTNode | None:
    """Returns what may keep a statement of a function from running once: an `if`, a loop, a `try`, a `match`."""
    for one in source.above(node):
        if isinstance(one, (cst.FunctionDef, cst.ClassDef)):
            return None
        if isinstance(one, (cst.For, cst.While, cst.Try, cst.Match)):
            return one
        if isinstance(one, cst.If) and "__name__" not in code(one.test):
            return one
    return None


def target_of(statement: cst.CSTNode | None) -> tuple[cst.BaseExpression | None, cst.BaseExpression | None]:
    """Returns (target, value) of `name = value`; (None, value) of `return value`; otherwise two None."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return None, None
    [small] = statement.body if len(statement.body) == 1 else [None]
    if isinstance(small, cst.Assign) and len(small.targets) == 1:
        return small.targets[0].target, small.value
    if isinstance(small, (cst.AnnAssign, cst.AugAssign)):
        return small.target, small.value
    if isinstance(small, cst.Return):
        return None, small.value
    return None, None


def assignments(source: Script, name: str, before: cst.CSTNode) -> list[cst.BaseExpression]:
    """Returns what is assigned to a name, in the same function, above a node; the nearest first."""
    function, line = source.function(before), source.line(before)
    found = []
    for node in own_nodes(function):
        if isinstance(node, cst.SimpleStatementLine) and source.line(node) < line:
            target, value = target_of(node)
            if value is not None and is_chain(target) and code(target) == name:
                found.append(value)
    return found[::-1]


def made_of(source: Script, node: cst.BaseExpression | None, before: cst.CSTNode) -> cst.BaseExpression | None:
    """Returns the last value of a name above a node, in the same function; what is no name, itself."""
    return next(iter(assignments(source, code(node), before)), None) if is_chain(node) else node


def own_nodes(function: cst.CSTNode) -> list[cst.CSTNode]:
    """Returns the nodes of a function, without those of functions within it."""
    inner = (cst.FunctionDef, cst.Lambda)
    return list(walk(function, lambda node: node is function or not isinstance(node, inner)))[1:]
