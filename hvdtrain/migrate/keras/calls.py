"""Converts calls of Horovod's Keras beside the optimizer: callbacks, ranks, numbers over all ranks."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import libcst as cst

from hvdtrain.migrate.keras.wrapping import keras_of
from hvdtrain.migrate.script import ranks
from hvdtrain.migrate.script.plan import SETS_REASON, Rewrite, arguments_of
from hvdtrain.migrate.script.ranks import Arguments, Handler, attribute, initialized, method, object_of, shutdown
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
    plan.then(statement, [f"{keras_of(plan)}.utils.set_random_seed({ranks.ranks(plan, inits[0])}.rank)"])
    plan.note(
        drawn[0],
        "drawn without a seed, by each rank its own: hvdtrain.init seeds all ranks equally, and the new script then"
        " seeds each by its number",
    )


# they set the optimizer's learning rate, and nothing else
_KEPT = ("callbacks.LearningRateWarmupCallback", "callbacks.LearningRateScheduleCallback")
_SENT = "hvk.callbacks(model) of fit give all ranks rank 0's variables; outside of fit there is none"
_REASONS = {
    "DistributedGradientTape": "a loop of one's own has no counterpart of the tape: hvdtrain averages in fit, also of a"
    " model with a train_step of its own; hvdtrain guard watches this script as it is",
    "broadcast_variables": _SENT,
    "broadcast_global_variables": _SENT,
    "PartialDistributedOptimizer": "layers of each rank's own: hvdtrain trains one model on all ranks",
    "elastic": "elastic state has no counterpart: hvdtrain resumes from checkpoints, exactly, at any number of ranks"
    " (hvdtrain.Checkpointer, hvdtrain launch --max-restarts)",
    "callbacks.BestModelCheckpoint": "write keras.callbacks.ModelCheckpoint(..., save_best_only=True), on rank 0",
    "allgather": "hvd.allgather has no counterpart of its form: world.gather(value) is a list of all ranks' values",
    **dict.fromkeys(("add_process_set", "remove_process_set", "ProcessSet"), SETS_REASON),
    "horovod.run": ranks.RUN_REASON,
    "": "has no counterpart in hvdtrain",
}


def kept_imports(plan: Rewrite) -> dict[str, str]:
    """Returns the import of those of Horovod's callbacks that stay, by what needs it."""
    names = sorted(name.split(".")[1] for name in _KEPT if name in plan.needs)
    if names:
        plan.needs.add("kept callbacks")
    return {"keras": "import keras", "kept callbacks": f"from {plan.prefix}callbacks import {', '.join(names)}"}


def move_rest(plan: Rewrite, models: Collection[str]) -> None:
    """Moves every remaining use of Horovod, or refuses it; `models` are the last names of those that are prepared."""
    move_callbacks(plan, models)
    seed_each_rank(plan)
    ranks.move_rest(plan, dict.fromkeys(_HANDLERS, _move_call), _REASONS, dict.fromkeys(_KEPT, _keep))


def _keep(plan: Rewrite, node: cst.CSTNode, short: str) -> None:
    """Keeps Horovod's callback that sets the learning rate: it works beside hvdtrain's average."""
    name = short.split(".")[1]
    plan.needs.add(short)
    plan.replace(node, name)
    plan.note(node, f"{name} stays Horovod's, which must be there: hvdtrain.LR(warmup=...) is its counterpart, by hand")


# -- the rest ----------------------------------------------------------------------------------------------------
def _move_call(plan: Rewrite, call: cst.Call, name: str) -> None:
    arguments = arguments_of(plan, call, name)
    if arguments is not None:
        plan.settle(arguments.get("compression"))
        _HANDLERS[name](plan, call, name, arguments)


def _broadcast(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    """Converts `hvd.broadcast` of a number, or of another value that can be pickled."""
    if plan.module == "horovod.tensorflow":
        plan.refuse(call, "hvd.broadcast of a tensor: world.broadcast is of what can be pickled")
        return
    does = f"{ranks.ranks(plan, call)}.broadcast"
    plan.note(call, f"{does} gives what rank 0 has, as it is; Horovod's made an array of it")
    ranks.send(plan, call, name, does)


def _number(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    """Converts `hvd.allreduce` of a number; `world.mean` raises an error on anything else."""
    op, average = arguments.get("op"), literal(arguments.get("average"))
    found = "" if op is None else plan.source.qualified(op).removeprefix(plan.prefix)
    if plan.module == "horovod.tensorflow":
        plan.refuse(call, "hvd.allreduce of a tensor: world.mean({...}) is of numbers")
        return
    scales = [literal(arguments.get(scale)) for scale in ("prescale_factor", "postscale_factor")]
    if found not in ("", "Average", "Sum") or {"", "1", "1.0"} < {"", "1", "1.0", *scales}:
        plan.refuse(call, "hvd.allreduce must be a mean, or a sum, without factors")
        return
    if op is None and average not in ("", "None", "True", "False"):
        plan.refuse(call, f"average={average}: whether this is a mean or a sum is not known")
        return
    plan.settle(op)
    does = "sum" if found == "Sum" or (op is None and average == "False") else "mean"
    world, key = ranks.ranks(plan, call), literal(arguments.get("name"))
    key = key if isinstance(arguments.get("name"), cst.SimpleString) else '"value"'
    plan.note(call, f"world.{does} is of numbers: where this is an array, or in a graph, it raises")

    def written(updated: cst.Call) -> str:
        value = code(plan.bind(updated, name)["value"])
        return f"{world}.{does}({{{key}: {value}}})[{key}]"

    plan.replace(call, written)


_HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(("rank", "size", "local_rank", "local_size"), attribute),
    "allreduce": _number,
    "broadcast": _broadcast,
    "broadcast_object": object_of,
    "allgather_object": object_of,
    "barrier": method,
    "shutdown": shutdown,
    "is_initialized": initialized,
}
