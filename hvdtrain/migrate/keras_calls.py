"""What else a script asks of Horovod's Keras: callbacks of `fit`, who it is, numbers over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import libcst as cst

from hvdtrain.migrate.keras_wrapping import arguments_of
from hvdtrain.migrate.plan import Plan, statement_of, target_of
from hvdtrain.migrate.ranks import (
    RUN_REASON,
    Arguments,
    attribute,
    initialized,
    method,
    move_run,
    object_of,
    ranks,
    shutdown,
    uses,
)
from hvdtrain.migrate.source import KERAS_SIGNATURES, Source, bind, calls, code, is_chain, literal, tail, walk

# hvdtrain's own callbacks do what these do
_REPLACED = ("callbacks.BroadcastGlobalVariablesCallback", "callbacks.MetricAverageCallback")
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
    "add_process_set": "process sets: hvdtrain trains one model on all ranks",
    "remove_process_set": "process sets: hvdtrain trains one model on all ranks",
    "ProcessSet": "process sets: hvdtrain trains one model on all ranks",
    "horovod.run": RUN_REASON,
}


def kept_imports(plan: Plan) -> dict[str, str]:
    """The import of those of Horovod's callbacks that stay, by what needs it."""
    names = sorted(name.split(".")[1] for name in _KEPT if name in plan.needs)
    if names:
        plan.needs.add("kept callbacks")
    return {"keras": "import keras", "kept callbacks": f"from {plan.prefix}callbacks import {', '.join(names)}"}


def move_rest(plan: Plan) -> None:
    """Moves every use of Horovod that is left, or refuses it."""
    source = plan.source
    _move_pinning(plan)
    _move_callbacks(plan)
    for node, meaning in uses(plan):
        outer, short = source.parent(node), meaning.removeprefix(plan.prefix)
        called = outer if isinstance(outer, cst.Call) and outer.func is node else None
        if called is not None and short in _HANDLERS:
            _move_call(plan, called, short)
        elif called is not None and short == "horovod.run":
            move_run(plan, called)
        elif short in ("Compression.fp16", "Compression.none"):
            plan.replace(node, '"fp16"' if short.endswith("fp16") else "None")
        elif short in _KEPT:
            _keep(plan, node, short)
        elif short in (plan.module, "horovod"):
            plan.refuse(node, f"{code(node)} itself as a value: what is done with it cannot be told")
        else:
            reason = next((text for begin, text in _REASONS.items() if short.startswith(begin)), "")
            plan.refuse(node, reason or f"{code(node)} has no counterpart in hvdtrain")


def _keep(plan: Plan, node: cst.CSTNode, short: str) -> None:
    """A callback that sets the learning rate stays Horovod's, which works beside hvdtrain's average."""
    name = short.split(".")[1]
    plan.needs.add(short)
    plan.replace(node, name)
    plan.note(node, f"{name} stays Horovod's, which must be there: hvdtrain.LR(warmup=...) is its counterpart, by hand")


# -- callbacks ---------------------------------------------------------------------------------------------------
def _move_callbacks(plan: Plan) -> None:
    """Horovod's callbacks leave their lists, and `fit` is given hvdtrain's of the same model."""
    source = plan.source
    moved: dict[cst.List, list[cst.BaseElement]] = {}
    fits: list[cst.Call] = []
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
        element = source.parent(call)
        at = source.parent(element) if isinstance(element, cst.Element) else None
        added = element if isinstance(element, cst.Arg) else None
        if isinstance(at, cst.List):
            found, alone = _fits_of_list(source, at), False
        elif added is not None and isinstance(outer := source.parent(added), cst.Call) and tail(outer.func) == "append":
            assert isinstance(outer.func, cst.Attribute)
            found, alone = _fits(source, code(outer.func.value)), True
        else:
            found, alone = [], False
        if not found:
            plan.refuse(
                call,
                f"hvd.{short} is moved out of a list of callbacks, of which can be told which model.fit is given it"
                " (callbacks=)",
            )
            continue
        fits += [fit for fit in found if fit not in fits]
        if alone:
            assert isinstance(outer, cst.Call)
            statement = statement_of(plan, outer, "append")
            if statement is not None:
                plan.remove(statement)
        else:
            assert isinstance(at, cst.List) and isinstance(element, cst.Element)
            moved.setdefault(at, []).append(element)
    empty = [name for at, gone in moved.items() if (name := _take_out(plan, at, gone, fits))]
    for fit in fits:
        _give(plan, fit, empty)


def _take_out(plan: Plan, at: cst.List, gone: list[cst.BaseElement], fits: list[cst.Call]) -> str:
    """Takes elements out of a list; returns its name where it is empty, of no other use, and goes."""
    source = plan.source
    statement = source.statement(at)
    target, value = target_of(statement) if isinstance(statement, cst.SimpleStatementLine) else (None, None)
    if len(gone) == len(at.elements) and value is at and isinstance(target, cst.Name):
        given = [target, *(_given(fit).value for fit in fits)]
        if not any(
            isinstance(node, cst.Name)
            and node.value == target.value
            and node not in given
            and not _is_a_part(source, node)
            for node in walk(source.module)
        ):
            assert isinstance(statement, cst.SimpleStatementLine)
            plan.remove(statement)
            return target.value

    def written(updated: cst.List) -> str:
        left = [new for old, new in zip(at.elements, updated.elements, strict=True) if old not in gone]
        if left and isinstance(left[-1].comma, cst.Comma) and not isinstance(at.elements[-1].comma, cst.Comma):
            left[-1] = left[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return code(updated.with_changes(elements=left)) if left else "[]"

    plan.replace(at, written)
    return ""


def _is_a_part(source: Source, node: cst.Name) -> bool:
    """Whether it is a keyword or an attribute, which name nothing by themselves."""
    outer = source.parent(node)
    return (isinstance(outer, cst.Arg) and outer.keyword is node) or (
        isinstance(outer, cst.Attribute) and outer.attr is node
    )


def _give(plan: Plan, fit: cst.Call, empty: list[str]) -> None:
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
        return ours if code(now) in empty else f"[*{ours}, *{code(now)}]"

    plan.replace(arg.value, written)


def _given(fit: cst.Call) -> cst.Arg:
    return next(arg for arg in fit.args if literal(arg.keyword) == "callbacks")


def _fits_of_list(source: Source, at: cst.List) -> list[cst.Call]:
    """The calls of `fit` that are given a list."""
    arg = source.parent(at)
    if isinstance(arg, cst.Arg) and isinstance(call := source.parent(arg), cst.Call):
        named = is_fit(call) and _given(call) is arg
        return [call] if named else []
    statement = source.statement(at)
    target, value = target_of(statement) if isinstance(statement, cst.SimpleStatementLine) else (None, None)
    return _fits(source, code(target)) if value is at and target is not None and is_chain(target) else []


def _fits(source: Source, name: str) -> list[cst.Call]:
    return [call for call in calls(source.module) if is_fit(call) and code(_given(call).value) == name]


def is_fit(call: cst.Call) -> bool:
    """Whether it is `model.fit(..., callbacks=...)`, of a model that has a name."""
    return (
        isinstance(call.func, cst.Attribute)
        and tail(call.func) == "fit"
        and is_chain(call.func.value)
        and any(literal(arg.keyword) == "callbacks" for arg in call.args)
    )


# -- GPUs --------------------------------------------------------------------------------------------------------
def _move_pinning(plan: Plan) -> None:
    """`hvdtrain.init` gives each rank its GPU: the lines that do go, since they would come too late."""
    source = plan.source
    local = plan.prefix + "local_rank"
    pins = [
        call
        for call in calls(source.module)
        if _device_call(source, call) == "set_visible_devices"
        and any(source.qualified(node) == local for node in walk(call))
    ]
    gone: list[Any] = []
    for pin in pins:
        block = source.function(pin)
        inside = [node for node in walk(block) if _pins(source, node, local)]
        gone += [node for node in inside if source.parent(node) not in inside and node not in gone]
        gone = [node for node in gone if not any(above in gone for above in source.above(node))]
    for statement in gone:
        plan.settle(statement)
        plan.remove(statement)
    for call in calls(source.module):
        if _device_call(source, call) == "list_physical_devices" and gone:
            statement = source.statement(call)
            target, value = target_of(statement) if isinstance(statement, cst.SimpleStatementLine) else (None, None)
            if value is call and isinstance(target, cst.Name) and not _used(source, target, gone):
                assert isinstance(statement, cst.SimpleStatementLine)
                plan.remove(statement)


def _device_call(source: Source, call: cst.CSTNode) -> str:
    name = source.qualified(call.func) if isinstance(call, cst.Call) else ""
    return name.split(".")[-1] if name.startswith("tensorflow.config.") else ""


def _pins(source: Source, node: cst.CSTNode, local: str) -> bool:
    """Whether a statement does nothing but choose this rank's GPU and how its memory is taken."""
    if isinstance(node, cst.SimpleStatementLine):
        [small] = node.body if len(node.body) == 1 else [None]
        value = small.value if isinstance(small, cst.Expr) else None
        does = "" if value is None else _device_call(source, value)
        ours = does == "set_visible_devices" and any(source.qualified(one) == local for one in walk(node))
        return ours or does == "set_memory_growth"
    if isinstance(node, (cst.If, cst.For)) and node.orelse is None and isinstance(node.body, cst.IndentedBlock):
        return all(_pins(source, one, local) for one in node.body.body)
    return False


def _used(source: Source, name: cst.Name, gone: Sequence[cst.CSTNode]) -> bool:
    """Whether a name is used elsewhere than in statements that go."""
    return any(
        isinstance(node, cst.Name)
        and node.value == name.value
        and node is not name
        and not any(above in gone for above in source.above(node))
        for node in walk(source.module)
    )


# -- the rest ----------------------------------------------------------------------------------------------------
def _move_call(plan: Plan, call: cst.Call, name: str) -> None:
    arguments = arguments_of(plan, call, name)
    if arguments is not None and name != "init":
        plan.settle(arguments.get("compression"))
        _HANDLERS[name](plan, call, name, arguments)


def _number(plan: Plan, call: cst.Call, name: str, arguments: Arguments) -> None:
    """`hvd.allreduce` of a number; of anything else `world.mean` raises."""
    op, average = arguments.get("op"), literal(arguments.get("average"))
    found = "" if op is None else plan.source.qualified(op).removeprefix(plan.prefix)
    if plan.module == "horovod.tensorflow":
        plan.refuse(call, "hvd.allreduce of a tensor: world.mean({...}) is of numbers")
        return
    scales = [literal(arguments.get(scale)) for scale in ("prescale_factor", "postscale_factor")]
    if found not in ("", "Average", "Sum") or {"", "1", "1.0"} < {"", "1", "1.0", *scales}:
        plan.refuse(call, "hvd.allreduce is moved as a mean, or a sum, without factors")
        return
    if op is None and average not in ("", "None", "True", "False"):
        plan.refuse(call, f"average={average}: whether this is a mean or a sum cannot be told")
        return
    plan.settle(op)
    does = "sum" if found == "Sum" or (op is None and average == "False") else "mean"
    world, key = ranks(plan, call), literal(arguments.get("name"))
    key = key if isinstance(arguments.get("name"), cst.SimpleString) else '"value"'
    plan.note(call, f"world.{does} is of numbers: where this is an array, or in a graph, it raises")

    def written(updated: cst.Call) -> str:
        value = code((bind(updated, name, KERAS_SIGNATURES) or {})["value"])
        return f"{world}.{does}({{{key}: {value}}})[{key}]"

    plan.replace(call, written)


_HANDLERS: dict[str, Callable[[Plan, cst.Call, str, Arguments], None]] = {
    **dict.fromkeys(("rank", "size", "local_rank", "local_size"), attribute),
    "allreduce": _number,
    "broadcast_object": object_of,
    "allgather_object": object_of,
    "barrier": method,
    "shutdown": shutdown,
    "is_initialized": initialized,
}
