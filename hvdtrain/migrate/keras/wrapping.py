"""Turns `hvd.DistributedOptimizer` and `hvd.load_model` of Horovod's Keras into `hvk.prepare(model)`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import libcst as cst

from hvdtrain.migrate.script.plan import (
    Rewrite,
    arguments_of,
    assignments,
    condition_above,
    statement_of,
    target_of,
)
from hvdtrain.migrate.script.source import (
    Script,
    calls,
    code,
    find,
    is_chain,
    literal,
    owner_of,
    tail,
    walk,
)
from hvdtrain.migrate.script.training import Optimizers

_OF_NO_MATTER = ("name", "device_dense", "device_sparse", "gradient_predivide_factor", "num_groups", "groups")
_ACCUMULATES = (
    "Horovod counts passes as iterations, by which Adam and schedules go, Keras counts updates: those two train"
    " otherwise than before"
)
# `if hvd.size() > 1:`; one process alone averages nothing anyway
_FOR_MANY = re.compile(r"[\w.]*\bsize\(\) *(> *1|>= *2|!= *1)")


# -- optimizers --------------------------------------------------------------------------------------------------
def move_wraps(plan: Rewrite) -> set[str]:
    """Takes the wrapper off every optimizer, and prepares the models that are compiled with them, or loaded.

    Returns the last names of these models.
    """
    _move_pinning(plan)
    accumulates, models, prepared = False, set[str](), list[cst.Call]()
    for call in plan.calls("DistributedOptimizer") if plan.module != "horovod.tensorflow" else ():
        plan.settle(call.func)
        arguments = arguments_of(plan, call, "DistributedOptimizer")
        if arguments is not None and _check(plan, call, arguments):
            accumulates |= _accumulate(plan, call, arguments)
            models |= _take_off(plan, call, arguments, prepared)
    for call in plan.calls("load_model"):
        plan.settle(call.func)
        models |= _move_load(plan, call, accumulates=accumulates)
    return models


def _check(plan: Rewrite, call: cst.Call, arguments: dict[str, cst.BaseExpression]) -> bool:
    """Returns True if each argument is kept, or changes no weights; refuses the call otherwise."""
    op, sets = arguments.get("op"), arguments.get("process_set")
    for node in (op, sets, *(arguments.get(name) for name in _OF_NO_MATTER)):
        plan.settle(node)
    if "optimizer" not in arguments:
        plan.refuse(call, "the arguments of hvd.DistributedOptimizer are not known")
    elif op is not None and plan.source.qualified(op) != plan.prefix + "Average":
        plan.refuse(op, f"op={code(op)}: hvk.prepare averages gradients over ranks, and does nothing else")
    elif sets is not None and plan.source.qualified(sets) != plan.prefix + "global_process_set":
        plan.refuse(sets, "a process set: hvdtrain trains one model on all ranks")
    elif not is_chain(arguments["optimizer"]) and not isinstance(arguments["optimizer"], cst.Call):
        plan.refuse(call, "DistributedOptimizer needs a name, or an optimizer that is made there")
    else:
        return True
    return False


def _accumulate(plan: Rewrite, call: cst.Call, arguments: dict[str, cst.BaseExpression]) -> bool:
    """Turns `backward_passes_per_step` into an argument of the plain optimizer; returns True if there is one."""
    passes = literal(arguments.get("backward_passes_per_step"))
    if passes in ("", "1"):
        return False
    if literal(arguments.get("average_aggregated_gradients")) != "True":
        plan.refuse(
            call,
            "backward_passes_per_step without average_aggregated_gradients=True adds gradients up, and Keras'"
            " gradient_accumulation_steps takes their mean: write average_aggregated_gradients=True, and multiply the"
            " learning rate by the passes, where the optimizer is plain SGD",
        )
        return False
    source, made = plan.source, arguments["optimizer"]
    if is_chain(made):
        found = assignments(source, code(made), call)
        made = found[0] if len(found) == 1 else made
    if not isinstance(made, cst.Call) or ".optimizers." not in source.qualified(made.func) or not passes.isdigit():
        plan.refuse(
            call,
            "backward_passes_per_step is moved where it is a number, to the one line that makes the optimizer:"
            " gradient_accumulation_steps=",
        )
        return False

    def written(updated: cst.Call) -> str:
        args = list(updated.args)
        if args and not isinstance(args[-1].comma, cst.Comma):
            args[-1] = args[-1].with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
        equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
        steps = cst.Arg(cst.Integer(passes), keyword=cst.Name("gradient_accumulation_steps"), equal=equal)
        return code(updated.with_changes(args=[*args, steps]))

    plan.note(call, _ACCUMULATES)
    plan.replace(made, written)
    return True


def _take_off(
    plan: Rewrite, call: cst.Call, arguments: dict[str, cst.BaseExpression], prepared: list[cst.Call]
) -> set[str]:
    """Puts the plain optimizer in the wrapped one's place, and prepares what is compiled with it.

    Returns the last names of the models; adds their calls of `compile` to `prepared`.
    """
    source, models = plan.source, set[str]()
    compiles = _compiles(plan, call)
    if not compiles:
        plan.refuse(
            call,
            "which model is compiled with it is not known: DistributedOptimizer is converted in model.compile(...),"
            " and where it is assigned to the name that a model is compiled with, or returned",
        )
    for found in compiles:
        statement = statement_of(plan, found, "model.compile")
        assert isinstance(found.func, cst.Attribute)
        if statement is None or found in prepared:
            continue
        if not is_chain(found.func.value):
            plan.refuse(found, "a model needs a name to be prepared")
            continue
        prepared.append(found)
        plan.needs.add("hvk")
        models.add(tail(found.func.value))
        plan.then(statement, [_prepare(plan, code(found.func.value), arguments)])
    line = source.statement(call)
    target, value = target_of(line)
    if line is not None and value is call and target is not None and code(target) == code(arguments["optimizer"]):
        plan.remove(line)
    else:
        plan.replace(call, lambda updated: code(plan.bind(updated, "DistributedOptimizer")["optimizer"]))
    return models


def _compiles(plan: Rewrite, call: cst.Call) -> list[cst.Call]:
    """Returns the calls of `model.compile` that may be given what a call makes: itself, or under a name."""
    source, names = plan.source, Optimizers()
    target, value = target_of(source.statement(call))
    if value is call and target is not None:
        names.prepared[tail(target)] = ""
    elif value is call and isinstance(function := source.function(call), cst.FunctionDef):
        names.makers[function.name.value] = {-1: ""}
    names.spread(source)

    def is_it(node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Call):
            return node is call or -1 in names.makers.get(tail(node.func), {})
        return tail(node) in names.prepared

    found = []
    for one in calls(source.module):
        first = one.args[0].value if one.args and one.args[0].keyword is None else None
        given = next((arg.value for arg in one.args if literal(arg.keyword) == "optimizer"), first)
        given = given if owner_of(one, "compile") is not None else None
        known = [is_it(node) for node in _may_be(source, given, one)] if given is not None else []
        if any(known):
            found.append(one)
            _note_condition(plan, call, one, others=not all(known))
    return found


def _note_condition(plan: Rewrite, call: cst.Call, compiled: cst.Call, *, others: bool) -> None:
    """Notes that the new script averages in any case, where the old one may compile with a plain optimizer."""
    above = condition_above(plan.source, call)
    for_many = isinstance(above, cst.If) and _FOR_MANY.fullmatch(code(above.test))
    if not for_many and (others or (above is not None and above not in list(plan.source.above(compiled)))):
        plan.note(call, "wrapped under a condition: the new script averages over ranks also where it does not hold")


def _may_be(source: Script, node: cst.BaseExpression, at: cst.CSTNode) -> list[cst.BaseExpression]:
    """Returns what a name may have been given in its function: under conditions, and the nearest under none."""
    found: list[cst.BaseExpression] = []
    for value in assignments(source, code(node), at) if is_chain(node) else ():
        found.append(value)
        line = source.statement(value)
        if line is not None and any(one is source.parent(line) for one in source.above(at)):
            break
    return found or [node]


def _prepare(plan: Rewrite, model: str, arguments: dict[str, cst.BaseExpression]) -> str:
    compression = arguments.get("compression")
    extra = []
    if compression is not None and plan.source.qualified(compression) != plan.prefix + "Compression.none":
        fp16 = plan.source.qualified(compression) == plan.prefix + "Compression.fp16"
        extra.append('compression="fp16"' if fp16 else f"compression={code(compression)}")
    if literal(arguments.get("sparse_as_dense")) not in ("", "False"):
        extra.append(f"sparse_as_dense={code(arguments['sparse_as_dense'])}")
    return f"hvk.prepare({', '.join([model, *extra])})"


# -- loaded models -----------------------------------------------------------------------------------------------
def _move_load(plan: Rewrite, call: cst.Call, *, accumulates: bool) -> set[str]:
    """Prepares the model that `hvd.load_model` loads, and wraps; returns its last name."""
    arguments = arguments_of(plan, call, "load_model")
    if arguments is None:
        return set()
    statement = plan.source.statement(call)
    target, value = target_of(statement)
    if value is not call or not is_chain(target) or "filepath" not in arguments:
        plan.refuse(call, "hvd.load_model needs to be assigned to one name")
        return set()
    if "custom_optimizers" in arguments:
        plan.refuse(call, "custom_optimizers: Keras takes them by name, custom_objects={...}")
        return set()
    for name in ("compression", "legacy_opts"):
        if name != "compression" or plan.source.qualified(arguments.get(name, call)).endswith(".none"):
            plan.settle(arguments.get(name))
    assert isinstance(statement, cst.SimpleStatementLine)
    model = code(target)
    plan.needs.add("hvk")
    keras = keras_of(plan)

    def loads(updated: cst.Call) -> str:
        found = plan.bind(updated, "load_model")
        objects = [f"custom_objects={code(found['custom_objects'])}"] if "custom_objects" in found else []
        return f"{keras}.models.load_model({', '.join([code(found['filepath']), *objects])})"

    plan.replace(call, loads)
    more = []
    if accumulates:
        more.append(f"{model}.optimizer.gradient_accumulation_steps = None")
        plan.note(
            call,
            "hvd.load_model forgets backward_passes_per_step, and so does the new script: remove the line with"
            " gradient_accumulation_steps = None to continue accumulating",
        )
    plan.then(statement, [*more, _prepare(plan, model, arguments)])
    return {tail(target)}


def keras_of(plan: Rewrite) -> str:
    """Returns the script's name for Keras; adds an import if there is none."""
    found = {
        plan.source.qualified(node): code(node)
        for node in walk(plan.source.module)
        if plan.source.qualified(node) in ("keras", "tensorflow.keras")
        and not isinstance(plan.source.parent(node), (cst.ImportAlias, cst.ImportFrom, cst.AsName))
    }
    if not found:
        plan.needs.add("keras")
    return found.get("keras") or found.get("tensorflow.keras") or "keras"


# -- GPUs --------------------------------------------------------------------------------------------------------
def _move_pinning(plan: Rewrite) -> None:
    """Removes the lines that pin a GPU: `hvdtrain.init` does, and they would come too late."""
    source = plan.source
    local = plan.prefix + "local_rank"
    pins = [
        call
        for call in calls(source.module)
        if _device_call(source, call) == "set_visible_devices" and source.mentions(call, local)
    ]
    init = [source.line(call) for call in plan.calls("init")]
    for call in calls(source.module):
        sets = source.qualified(call.func).startswith("tensorflow.config.threading.set_")
        if sets and init and source.line(call) > init[0]:
            plan.refuse(call, "hvdtrain.init starts TensorFlow, whose threads are set before: put it above hvd.init()")
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
            target, value = target_of(statement)
            found = value is call and isinstance(target, cst.Name) and not _used(source, target, gone)
            if found and statement is not None:
                plan.remove(statement)


def _device_call(source: Script, call: cst.CSTNode) -> str:
    name = source.qualified(call.func) if isinstance(call, cst.Call) else ""
    return name.split(".")[-1] if name.startswith("tensorflow.config.") else ""


def _pins(source: Script, node: cst.CSTNode, local: str) -> bool:
    """Returns True if a statement only chooses this rank's GPU and how its memory is taken."""
    if isinstance(node, cst.SimpleStatementLine):
        [small] = node.body if len(node.body) == 1 else [None]
        value = small.value if isinstance(small, cst.Expr) else None
        does = "" if value is None else _device_call(source, value)
        ours = does == "set_visible_devices" and source.mentions(node, local)
        return ours or does == "set_memory_growth"
    if isinstance(node, (cst.If, cst.For)) and node.orelse is None and isinstance(node.body, cst.IndentedBlock):
        return all(_pins(source, one, local) for one in node.body.body)
    return False


def _used(source: Script, name: cst.Name, gone: Sequence[cst.CSTNode]) -> bool:
    """Returns True if a name is used outside of the statements that are removed."""
    return any(
        node.value == name.value and node is not name and not any(above in gone for above in source.above(node))
        for node in find(source.module, cst.Name)
    )
