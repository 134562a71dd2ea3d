"""Callbacks of Keras' `fit`: Horovod's leave their lists, hvdtrain's come; and what trains otherwise with these."""

from __future__ import annotations

from typing import Any

import libcst as cst

from hvdtrain.migrate.keras.names import binds, for_many, of_callers, reaching, uses_of, value_of
from hvdtrain.migrate.keras.wrapping import keras_of
from hvdtrain.migrate.script.plan import Rewrite, arguments_of, statement_of, target_of
from hvdtrain.migrate.script.ranks import SEEDS, ranks
from hvdtrain.migrate.script.source import Script, calls, code, find, is_chain, literal, owner_of, tail, walk

# hvdtrain's own callbacks do what these do
_REPLACED = ("callbacks.BroadcastGlobalVariablesCallback", "callbacks.MetricAverageCallback")
_ADDS = ("append", "extend", "insert")
_OTHERWISE = (
    "hvd.{} is moved out of a list of which can be told which model.fit is given it (callbacks=): made, added to,"
    " returned, and not used in another way, under no condition but `if hvd.size() > 1:`"
)


def move_callbacks(plan: Rewrite) -> None:
    """Horovod's callbacks leave their lists, and `fit` is given hvdtrain's of the same model."""
    source = plan.source
    moved: dict[cst.CSTNode, list[cst.CSTNode]] = {}
    fits: dict[cst.Call, list[cst.Call]] = {}
    for call in calls(source.module):
        short = source.qualified(call.func).removeprefix(plan.prefix)
        if short not in _REPLACED:
            continue
        plan.settle(call.func)
        arguments = arguments_of(plan, call, short)
        if arguments is None:
            continue
        if literal(arguments.get("root_rank")) not in ("", "0") or "local_variables" in arguments:
            plan.refuse(call, "hvk.callbacks(model) give all ranks all that rank 0 has: neither another's, nor a part")
            continue
        found = _fits_of(plan, call)
        if not found:
            plan.refuse(call, _OTHERWISE.format(short))
            continue
        for fit in found:
            fits.setdefault(fit, []).append(call)
        element = source.parent(call)
        assert element is not None
        at = source.parent(element)
        if isinstance(at, (cst.List, cst.Tuple)):
            moved.setdefault(at, []).append(element)
        elif at is not None and (statement := statement_of(plan, at, "what adds it")) is not None:
            plan.remove(statement)
    empty: list[cst.CSTNode] = []
    for at, gone in moved.items():
        empty += _take_out(plan, at, gone, list(fits))
    for fit, theirs in fits.items():
        _give(plan, fit, empty)
        _note_what_is_new(plan, fit, theirs)
    if fits:
        _note_readers(plan, fits)


def _fits_of(plan: Rewrite, call: cst.Call) -> list[cst.Call] | None:
    """The calls of `fit` that get a callback; None where that cannot be told."""
    element = plan.source.parent(call)
    at = plan.source.parent(element) if isinstance(element, (cst.Element, cst.Arg)) else None
    if isinstance(at, cst.Call):
        return _added_to(plan, at, call, call, [])
    return _goes(plan, at, call, []) if isinstance(at, (cst.List, cst.Tuple)) else None


def _goes(plan: Rewrite, node: cst.CSTNode, call: cst.Call, seen: list[cst.CSTNode]) -> list[cst.Call] | None:
    """The calls of `fit` that get what a list of callbacks holds; None where it is used in another way too.

    Args:
        plan: the script's.
        node: the list, or what has become of it.
        call: of Horovod's, that it holds.
        seen: names that it was followed to.
    """
    source = plan.source
    outer = source.parent(node)
    if isinstance(outer, cst.Arg) and isinstance(to := source.parent(outer), cst.Call):
        if _is_fit(to) and _given(to) is outer:
            return [to]
        return (
            _goes(plan, to, call, seen) if code(to.func) in ("list", "tuple") else _added_to(plan, to, node, call, seen)
        )
    if isinstance(outer, cst.BinaryOperation) and isinstance(outer.operator, cst.Add):
        return _goes(plan, outer, call, seen)
    if isinstance(outer, cst.StarredElement) and (around := source.parent(outer)) is not None:
        return _goes(plan, around, call, seen)
    if isinstance(outer, cst.Return):
        return of_callers(source, node, lambda one: _goes(plan, one, call, seen))
    if isinstance(outer, cst.AugAssign) and isinstance(outer.operator, cst.AddAssign):
        return _held(plan, outer.target, node, call, seen)
    target, value = target_of(source.statement(node))
    return _held(plan, target, node, call, seen) if value is node and target is not None else None


def _added_to(
    plan: Rewrite, to: cst.Call, node: cst.CSTNode, call: cst.Call, seen: list[cst.CSTNode]
) -> list[cst.Call] | None:
    """The same of what `append`, `extend` or `insert` is given."""
    name = owner_of(to, *_ADDS)
    return None if name is None else _held(plan, name, node, call, seen)


def _held(
    plan: Rewrite, name: cst.CSTNode, node: cst.CSTNode, call: cst.Call, seen: list[cst.CSTNode]
) -> list[cst.Call] | None:
    """The same of a list that has a name, from where `node` is assigned to it, or added."""
    source = plan.source
    if name in seen or not is_chain(name):
        return [] if name in seen else None
    seen.append(name)
    assigned = binds(source, name)
    origins = [name] if assigned else reaching(source, name, node)
    found: list[cst.Call] = []
    for use in uses_of(source, name):
        outer = source.parent(use)
        reach = reaching(source, use, use)
        if binds(source, use) or not set(origins) & set(reach) or use is name:
            continue
        added = isinstance(outer, cst.AugAssign) and isinstance(outer.operator, cst.AddAssign) and outer.target is use
        if added or _is_added_to(source, use):
            continue
        if not assigned and source.function(use) is source.function(node) and source.line(use) < source.line(node):
            continue  # before it was added
        fits = _goes(plan, use, call, seen)
        others = [one for one in reach if one not in origins and not _holds(plan, one, call, name)]
        if fits is None or ((others or not assigned) and not for_many(plan, node, use)):
            return None
        if others and reach[0] not in origins:
            return None
        found += fits
    return found


def _is_added_to(source: Script, node: cst.CSTNode) -> bool:
    outer = source.parent(node)
    call = source.parent(outer) if outer is not None else None
    return owner_of(call, *_ADDS) is node and call is not None and isinstance(source.parent(call), cst.Expr)


def _holds(plan: Rewrite, target: cst.CSTNode | None, call: cst.Call, name: cst.CSTNode) -> bool:
    """Whether what is assigned to a name is a list with the same callback, or made of the one that had the name."""
    value = None if target is None else value_of(plan.source, target)
    return value is not None and any(
        (is_chain(node) and code(node) == code(name))
        or (isinstance(node, cst.Call) and plan.source.qualified(node.func) == plan.source.qualified(call.func))
        for node in walk(value)
    )


def _take_out(plan: Rewrite, at: cst.CSTNode, gone: list[cst.CSTNode], fits: list[cst.Call]) -> list[cst.CSTNode]:
    """Takes elements out of a list; where it is empty, of no other use, and goes: what `fit` was given of it."""
    source = plan.source
    assert isinstance(at, (cst.List, cst.Tuple))
    statement = source.statement(at)
    if len(gone) == len(at.elements) and isinstance(statement, cst.SimpleStatementLine):
        target, value = target_of(statement)
        given = [_given(fit).value for fit in fits]
        if value is at and isinstance(source.parent(at), cst.AugAssign):
            plan.remove(statement)
            return []
        if value is at and target is not None and all(use is target or use in given for use in uses_of(source, target)):
            plan.remove(statement)
            return [use for use in uses_of(source, target) if use is not target]
        outer = source.parent(at)
        to = source.parent(outer) if isinstance(outer, cst.Arg) else None
        if isinstance(to, cst.Call) and tail(to.func) == "extend" and isinstance(source.parent(to), cst.Expr):
            plan.remove(statement)
            return []
    plan.replace(at, lambda updated: _without(at, updated, gone))
    return []


def _without(at: cst.List | cst.Tuple, updated: Any, gone: list[cst.CSTNode]) -> str:
    """A list without elements, nor what is said above and beside them."""
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


def _give(plan: Rewrite, fit: cst.Call, empty: list[cst.CSTNode]) -> None:
    """`fit` gets hvdtrain's callbacks before its own."""
    assert isinstance(fit.func, cst.Attribute)
    model = code(fit.func.value)
    plan.needs.add("hvk")
    arg = _given(fit)
    old = plan.expressions.get(arg.value)

    def written(updated: cst.BaseExpression) -> str:
        now = old(updated) if old is not None else updated
        ours = f"hvk.callbacks({model})"
        if isinstance(now, cst.List):
            inner = code(now.with_changes(lbracket=cst.LeftSquareBracket(), rbracket=cst.RightSquareBracket()))[1:-1]
            return f"[*{ours}, {inner}]" if now.elements else ours
        return ours if arg.value in empty or code(now) == "()" else f"[*{ours}, *{code(now)}]"

    plan.replace(arg.value, written)


def _given(fit: cst.Call) -> cst.Arg:
    return next(arg for arg in fit.args if literal(arg.keyword) == "callbacks")


def _is_fit(call: cst.Call) -> bool:
    """Whether it is `model.fit(..., callbacks=...)`, of a model that has a name."""
    return is_chain(owner_of(call, "fit")) and any(literal(arg.keyword) == "callbacks" for arg in call.args)


def _note_what_is_new(plan: Rewrite, fit: cst.Call, theirs: list[cst.Call]) -> None:
    """What hvdtrain's callbacks do more than those that `fit` was given; of a model that it has prepared."""
    source = plan.source
    assert isinstance(fit.func, cst.Attribute)
    model = code(fit.func.value)
    if "BroadcastGlobalVariablesCallback" not in {source.qualified(call.func).split(".")[-1] for call in theirs}:
        plan.note(fit, f"hvk.callbacks({model}) also give all ranks rank 0's variables: MetricAverageCallback did not")
    compiles = [
        call
        for call in calls(source.function(fit))
        if code(call.func) == f"{model}.compile" and source.line(call) < source.line(fit)
    ]
    plain = compiles and source.statement(compiles[-1]) not in plan.statements and not plan.refused
    if plain and f"{model}.optimizer" not in code(compiles[-1]):
        plan.refuse(fit, f"{model} is compiled with an optimizer of each rank's own, and given Horovod's callbacks")


# -- what trains otherwise than before -----------------------------------------------------------------------------
_READERS = ("ReduceLROnPlateau", "EarlyStopping")
_LOADS = ("set_weights", "load_weights", "assign")
_DRAWS = ("permutation", "shuffle", "choice", "rand", "randn", "randint", "random", "uniform", "normal", "sample")
_AVERAGED = "{} sees averages over all ranks from now on: hvk.callbacks(model), which average, stand first"
_DENOMINATOR = (
    "a mean over what is not left out, or by weights: Horovod took the mean of ranks' means, hvdtrain weighs each rank"
    " by what it counts, which is the mean over all"
)
_MASKS = "hvdtrain gives each rank masks of its own; ranks that are seeded alike drew the same ones with Horovod"
_SYNCHRONIZED = "synchronized=True: over each rank's own samples with Horovod, over those of all ranks with hvdtrain"


def note_differences(plan: Rewrite) -> None:
    """Says what hvdtrain does in another way than Horovod, on purpose, where it can be seen."""
    source = plan.source
    for call in calls(source.module):
        short = source.qualified(call.func).split(".")[-1]
        given = {literal(arg.keyword): literal(arg.value) for arg in call.args}
        if given.get("ignore_class", "None") != "None" or given.get("mask_zero") == "True" or short == "Masking":
            plan.note(call, _DENOMINATOR)
        if given.get("reduction", "")[1:-1] == "mean_with_sample_weight":
            plan.note(call, _DENOMINATOR)
        if given.get("synchronized") == "True":
            plan.note(call, _SYNCHRONIZED)
        if short.endswith("Dropout") or short == "GaussianNoise" or "recurrent_dropout" in given:
            plan.note(call, _MASKS)


def _note_readers(plan: Rewrite, fits: dict[cst.Call, list[cst.Call]]) -> None:
    """Callbacks that went by their own rank's logs; and those that change one rank's weights before the broadcast."""
    source = plan.source
    classes = find(source.module, cst.ClassDef)
    own = {node.name.value: node for node in classes if any(tail(base.value) == "Callback" for base in node.bases)}
    for call in calls(source.module):
        name, short = source.qualified(call.func), tail(call.func)
        reads = short in _READERS or any(
            literal(arg.keyword) == "save_best_only" and literal(arg.value) != "False" for arg in call.args
        )
        if name in own:
            reads = any(
                literal(node) == "logs" for one in _methods(own[name], "on_epoch_end") for node in walk(one.body)
            )
        given = _fits_of(plan, call) if reads else []
        if any(_is_averaged_anew(plan, call, fits[fit]) for fit in (fits if given is None else given) if fit in fits):
            plan.note(call, _AVERAGED.format(code(call.func)))
    for node in own.values():
        for begins in _methods(node, "on_train_begin"):
            of_one_rank = source.mentions(begins, plan.prefix + "rank")
            loads = [call for call in calls(begins) if tail(call.func) in _LOADS]
            if of_one_rank and loads:
                plan.refuse(loads[0], "hvk.callbacks(model), which send rank 0's, stand first in fit: load before fit")


def _is_averaged_anew(plan: Rewrite, call: cst.Call, theirs: list[cst.Call]) -> bool:
    """Whether a callback stood before MetricAverageCallback, or there was none."""
    source = plan.source
    order = list(calls(source.module))
    averages = [one for one in theirs if "MetricAverage" in source.qualified(one.func)]

    def around(one: cst.Call) -> cst.CSTNode | None:
        return source.parent(source.parent(one) or one)

    return not any(around(one) is not around(call) or order.index(one) < order.index(call) for one in averages)


def _methods(node: cst.ClassDef, name: str) -> list[cst.FunctionDef]:
    return [one for one in node.body.body if isinstance(one, cst.FunctionDef) and one.name.value == name]


def seed_each_rank(plan: Rewrite) -> None:
    """A script that seeds nothing draws other numbers on each rank; hvdtrain.init would seed all alike."""
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
            "drawn unseeded, by each rank its own; hvdtrain.init seeds all ranks alike, and the new script each by its"
            " own number behind it",
        )
