"""Callbacks of Keras' `fit`: hvdtrain's in place of Horovod's; and what hvdtrain does differently on purpose."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import libcst as cst

from hvdtrain.migrate.keras.wrapping import keras_of
from hvdtrain.migrate.script.plan import Rewrite, arguments_of
from hvdtrain.migrate.script.ranks import SEEDS, ranks
from hvdtrain.migrate.script.source import calls, code, find, is_chain, literal, owner_of, tail, walk

# expressions that need parentheses behind a star
_LOOSE = (cst.IfExp, cst.BooleanOperation, cst.UnaryOperation, cst.Comparison, cst.Lambda)
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
        _note_readers(plan, theirs)
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
    """Returns a list, as `updated`, without some of its elements and their comments."""
    left: list[Any] = []
    begins = updated.lbracket.whitespace_after if isinstance(updated, cst.List) else None
    for old, new in zip(at.elements, updated.elements, strict=True):
        if old not in gone:
            left.append(new)
            continue
        after = new.comma.whitespace_after if isinstance(new.comma, cst.Comma) else None
        before = left[-1].comma.whitespace_after if left else begins
        if not isinstance(after, cst.ParenthesizedWhitespace) or before is None:
            continue
        if isinstance(before, cst.ParenthesizedWhitespace):
            after = after.with_changes(first_line=before.first_line)
        if left:
            left[-1] = left[-1].with_changes(comma=left[-1].comma.with_changes(whitespace_after=after))
        else:
            begins = after
    if not left:
        return "[]" if isinstance(updated, cst.List) else "()"
    if isinstance(at, cst.List):
        comma, ends = left[-1].comma, updated.rbracket.whitespace_before
        if at.elements[-1] in gone and all(
            isinstance(one, cst.ParenthesizedWhitespace) for one in (ends, getattr(comma, "whitespace_after", None))
        ):
            ends = ends.with_changes(first_line=comma.whitespace_after.first_line)
            left[-1] = left[-1].with_changes(comma=cst.Comma())
        if not isinstance(at.elements[-1].comma, cst.Comma):
            left[-1] = left[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        begins = begins or cst.SimpleWhitespace("")
        brackets = cst.LeftSquareBracket(begins), cst.RightSquareBracket(ends)
        updated = updated.with_changes(lbracket=brackets[0], rbracket=brackets[1])
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


# -- what the proof does not show: it draws alike, and ends after some batches --------------------------------------
_READERS = ("ReduceLROnPlateau", "EarlyStopping")
_DRAWS = ("permutation", "shuffle", "choice", "rand", "randn", "randint", "random", "uniform", "normal", "sample")
_AVERAGED = "{} now sees averages over all ranks: hvk.callbacks(model), which average, stand first"
_MASKS = "hvdtrain gives each rank masks of its own; ranks with equal seeds drew equal masks with Horovod"


def note_masks(plan: Rewrite) -> None:
    """Notes layers whose masks differ between ranks from now on."""
    for call in calls(plan.source.module):
        short = plan.source.qualified(call.func).split(".")[-1]
        recurrent = any(literal(arg.keyword) == "recurrent_dropout" for arg in call.args)
        if short.endswith("Dropout") or short == "GaussianNoise" or recurrent:
            plan.note(call, _MASKS)


def _note_readers(plan: Rewrite, theirs: list[cst.Call]) -> None:
    """Notes callbacks that read the logs of their own rank, as no MetricAverageCallback stands before them."""
    source = plan.source
    order = list(calls(source.module))
    averages = [order.index(call) for call in theirs if "MetricAverage" in source.qualified(call.func)]
    classes = find(source.module, cst.ClassDef)
    own = {node.name.value for node in classes if _reads_logs(node)}
    for place, call in enumerate(order):
        best = any(literal(arg.keyword) == "save_best_only" and literal(arg.value) != "False" for arg in call.args)
        reads = tail(call.func) in _READERS or best or source.qualified(call.func) in own
        if reads and not any(average < place for average in averages):
            plan.note(call, _AVERAGED.format(code(call.func)))


def _reads_logs(node: cst.ClassDef) -> bool:
    """Returns True for a callback that uses the logs of an epoch."""
    methods = [one for one in node.body.body if isinstance(one, cst.FunctionDef) and one.name.value == "on_epoch_end"]
    is_callback = any(tail(base.value) == "Callback" for base in node.bases)
    return is_callback and any(literal(name) == "logs" for one in methods for name in walk(one.body))


def seed_each_rank(plan: Rewrite) -> None:
    """Seeds each rank of a script that seeds nothing: hvdtrain.init would seed all ranks equally."""
    source = plan.source
    drawn, init = list[cst.Call](), None
    for call in calls(source.module):
        name, short = source.qualified(call.func), tail(call.func)
        if name in SEEDS:
            return
        if name == plan.prefix + "init":
            init = call
        seeded = [arg for arg in call.args if literal(arg.keyword) == "seed"] or len(call.args) == 0
        shuffles = short == "shuffle" and not seeded and isinstance(call.func, cst.Attribute)  # of a data set
        if shuffles or (name.startswith(("numpy.random.", "random.")) and name.count(".") < 3 and short in _DRAWS):
            drawn.append(call)
    statement = source.statement(init) if init is not None else None
    if drawn and init is not None and isinstance(statement, cst.SimpleStatementLine):
        plan.then(statement, [f"{keras_of(plan)}.utils.set_random_seed({ranks(plan, init)}.rank)"])
        plan.note(
            drawn[0],
            "drawn without a seed, by each rank its own: hvdtrain.init seeds all ranks equally, and the new script then"
            " seeds each by its number",
        )
