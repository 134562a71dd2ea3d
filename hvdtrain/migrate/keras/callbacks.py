"""Callbacks of Keras' `fit`: hvdtrain's in place of Horovod's; and seeds of ranks that seed nothing."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import libcst as cst

from hvdtrain.migrate.keras.wrapping import keras_of
from hvdtrain.migrate.script.plan import Rewrite, arguments_of
from hvdtrain.migrate.script.ranks import ranks
from hvdtrain.migrate.script.source import calls, code, is_chain, literal, owner_of, tail

# expressions that need parentheses behind a star
_LOOSE = (cst.IfExp, cst.BooleanOperation, cst.UnaryOperation, cst.Comparison, cst.Lambda)
_SEEDS = (
    "numpy.random.seed", "random.seed", "tensorflow.random.set_seed", "keras.utils.set_random_seed",
    "tensorflow.keras.utils.set_random_seed",
)  # fmt: skip
# hvdtrain's own callbacks do what these do
_REPLACED = ("callbacks.BroadcastGlobalVariablesCallback", "callbacks.MetricAverageCallback")


def move_callbacks(plan: Rewrite, models: Collection[str]) -> None:
    """Takes Horovod's callbacks out of the script, and gives hvdtrain's to `fit` of the prepared models."""
    source = plan.source
    moved: dict[cst.List | cst.Tuple, list[cst.CSTNode]] = {}
    theirs: list[cst.Call] = []
    for call in calls(source.module):
        short = source.qualified(call.func).removeprefix(plan.prefix)
        if short not in _REPLACED:
            continue
        plan.settle(call.func)
        arguments = arguments_of(plan, call, short)
        if arguments is None:
            continue
        if literal(arguments.get("root_rank")) not in ("", "0") or "local_variables" in arguments:
            plan.refuse(call, "hvk.callbacks(model) send all that rank 0 has: no other rank's, and no part of it")
            continue
        theirs.append(call)
        _take_out(plan, call, moved)
    for at, gone in moved.items():
        plan.replace(at, functools.partial(_without, at, gone))
    if theirs:
        given = [call for call in calls(source.module) if any(literal(arg.keyword) == "callbacks" for arg in call.args)]
        fits = [call for call in given if is_chain(owner_of(call, "fit"))]
        named = [fit for fit in fits if tail(owner_of(fit, "fit") or fit) in models]
        for fit in named or fits:
            _give(plan, fit)
        if not fits:
            plan.refuse(theirs[0], "no model.fit(..., callbacks=...) in this file can be given hvdtrain's callbacks")


def _take_out(plan: Rewrite, call: cst.Call, moved: dict[cst.List | cst.Tuple, list[cst.CSTNode]]) -> None:
    """Adds a callback in a list to `moved`, which takes it out; elsewhere puts one that does nothing in its place."""
    source = plan.source
    element = source.parent(call)
    at = source.parent(element) if element is not None else None
    if isinstance(at, (cst.List, cst.Tuple)) and isinstance(element, cst.Element):
        moved.setdefault(at, []).append(element)
        return
    statement = source.statement(call)
    adds = at is not None and owner_of(at, "append", "insert") and isinstance(source.parent(at), cst.Expr)
    if adds and isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
        plan.remove(statement)
        return
    plan.replace(call, f"{keras_of(plan)}.callbacks.Callback()")


def _without(at: cst.List | cst.Tuple, gone: list[cst.CSTNode], updated: Any) -> str:
    """Returns a list, as `updated`, without some of its elements."""
    left = [new for old, new in zip(at.elements, updated.elements, strict=True) if old not in gone]
    if not left:
        return "[]" if isinstance(updated, cst.List) else "()"
    if isinstance(updated, cst.List) and at.elements[-1] in gone:
        ends, after = updated.rbracket.whitespace_before, getattr(left[-1].comma, "whitespace_after", None)
        comma: cst.Comma | cst.MaybeSentinel = cst.MaybeSentinel.DEFAULT
        if isinstance(ends, cst.ParenthesizedWhitespace) and isinstance(after, cst.ParenthesizedWhitespace):
            ends = ends.with_changes(first_line=after.first_line)
            comma, updated = cst.Comma(), updated.with_changes(rbracket=cst.RightSquareBracket(ends))
        left[-1] = left[-1].with_changes(comma=comma)
    return code(updated.with_changes(elements=left))


def _give(plan: Rewrite, fit: cst.Call) -> None:
    """Puts hvdtrain's callbacks before those of a `fit`."""
    assert isinstance(fit.func, cst.Attribute)
    ours = f"hvk.callbacks({code(fit.func.value)})"
    plan.needs.add("hvk")
    value = next(arg.value for arg in fit.args if literal(arg.keyword) == "callbacks")
    old = plan.expressions.get(value)

    def written(updated: cst.BaseExpression) -> str:
        now = old(updated) if old is not None else updated
        if isinstance(now, cst.List):
            inner = code(now.with_changes(lbracket=cst.LeftSquareBracket(), rbracket=cst.RightSquareBracket()))[1:-1]
            return f"[*{ours}, {inner}]" if now.elements else ours
        text = f"({code(now)})" if isinstance(now, _LOOSE) and not now.lpar else code(now)
        return ours if text == "()" else f"[*{ours}, *{text}]"

    plan.replace(value, written)


# -- what the proof does not show: it draws alike ------------------------------------------------------------------
_DRAWS = ("permutation", "shuffle", "choice", "rand", "randn", "randint", "random", "uniform", "normal", "sample")


def seed_each_rank(plan: Rewrite) -> None:
    """Seeds each rank of a script that draws and seeds nothing: hvdtrain.init would seed all ranks equally."""
    found = list(calls(plan.source.module))
    drawn = [call for call in found if tail(call.func) in _DRAWS]
    inits = plan.calls("init")
    statement = plan.source.statement(inits[0]) if inits else None
    if not drawn or statement is None or any(plan.source.qualified(call.func) in _SEEDS for call in found):
        return
    plan.then(statement, [f"{keras_of(plan)}.utils.set_random_seed({ranks(plan, inits[0])}.rank)"])
    plan.note(
        drawn[0],
        "drawn without a seed, by each rank its own: hvdtrain.init seeds all ranks equally, and the new script then"
        " seeds each by its number",
    )
