"""Turns `hvd.DistributedOptimizer` and `hvd.load_model` of Horovod's Keras into `hvk.prepare(model)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

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
    Statement,
    calls,
    code,
    is_chain,
    literal,
    owner_of,
    tail,
    walk,
)

_OF_NO_MATTER = ("name", "device_dense", "device_sparse", "gradient_predivide_factor", "num_groups", "groups")
_ACCUMULATES = (
    "Horovod counts passes as iterations, by which Adam and schedules go, Keras counts updates: those two train"
    " otherwise than before"
)


# -- optimizers --------------------------------------------------------------------------------------------------
def move_wraps(plan: Rewrite) -> set[str]:
    """Takes the wrapper off every optimizer, and prepares the models that are compiled with them, or loaded.

    Returns the last names of these models.
    """
    _move_pinning(plan)
    wraps: list[tuple[cst.Call, dict[str, cst.BaseExpression]]] = []
    for call in plan.calls("DistributedOptimizer") if plan.module != "horovod.tensorflow" else ():
        plan.settle(call.func)
        arguments = arguments_of(plan, call, "DistributedOptimizer")
        if arguments is not None and _check(plan, call, arguments):
            _accumulate(plan, call, arguments)
            _take_off(plan, call, arguments)
            wraps.append((call, arguments))
    models = _prepare_compiled(plan, wraps) if wraps else set[str]()
    for call in plan.calls("load_model"):
        plan.settle(call.func)
        models |= _move_load(plan, call)
    return models


def _check(plan: Rewrite, call: cst.Call, arguments: dict[str, cst.BaseExpression]) -> bool:
    """Returns True if each argument is kept, or changes no weights; refuses the call otherwise."""
    op = arguments.get("op")
    for node in (op, *(arguments.get(name) for name in _OF_NO_MATTER)):
        plan.settle(node)
    if "optimizer" not in arguments:
        plan.refuse(call, "the arguments of hvd.DistributedOptimizer are not known")
    elif op is not None and plan.source.qualified(op) != plan.prefix + "Average":
        plan.refuse(op, f"op={code(op)}: hvk.prepare averages gradients over ranks, and does nothing else")
    elif not is_chain(arguments["optimizer"]) and not isinstance(arguments["optimizer"], cst.Call):
        plan.refuse(call, "DistributedOptimizer needs a name, or an optimizer that is made there")
    else:
        return True
    return False


def _accumulate(plan: Rewrite, call: cst.Call, arguments: dict[str, cst.BaseExpression]) -> None:
    """Turns `backward_passes_per_step` into an argument of the plain optimizer."""
    passes = literal(arguments.get("backward_passes_per_step"))
    if passes in ("", "1"):
        return
    if literal(arguments.get("average_aggregated_gradients")) != "True":
        plan.refuse(
            call,
            "backward_passes_per_step without average_aggregated_gradients=True adds gradients up, and Keras'"
            " gradient_accumulation_steps takes their mean: write average_aggregated_gradients=True, and multiply the"
            " learning rate by the passes, where the optimizer is plain SGD",
        )
        return
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
        return

    def written(updated: cst.Call) -> str:
        args = list(updated.args)
        if args and not isinstance(args[-1].comma, cst.Comma):
            args[-1] = args[-1].with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
        equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
        steps = cst.Arg(cst.Integer(passes), keyword=cst.Name("gradient_accumulation_steps"), equal=equal)
        return code(updated.with_changes(args=[*args, steps]))

    plan.needs.add("gradient_accumulation_steps")
    plan.note(call, _ACCUMULATES)
    plan.replace(made, written)


def _take_off(plan: Rewrite, call: cst.Call, arguments: dict[str, cst.BaseExpression]) -> None:
    """Puts the plain optimizer in the wrapped one's place."""
    line = plan.source.statement(call)
    target, value = target_of(line)
    if line is not None and value is call and target is not None and code(target) == code(arguments["optimizer"]):
        plan.remove(line)
    else:
        plan.replace(call, lambda updated: code(plan.bind(updated, "DistributedOptimizer")["optimizer"]))
    if condition_above(plan.source, call) is not None:
        plan.note(call, "wrapped under a condition: the new script averages over ranks also where it does not hold")


def _prepare_compiled(plan: Rewrite, wraps: Sequence[tuple[cst.Call, dict[str, cst.BaseExpression]]]) -> set[str]:
    """Prepares each model that may be compiled with a wrapped optimizer; returns the last names of the models.

    A model that is compiled with a plain one under a name, and prepared all the same, is not proven.
    """
    alone = [call for call in calls(plan.source.module) if isinstance(plan.source.parent(call), cst.Expr)]
    found = [call for call in alone if owner_of(call, "compile") and not _is_plain(plan, call)]
    if not found:
        plan.refuse(
            wraps[0][0],
            "which model is compiled with it is not known: DistributedOptimizer is converted beside model.compile(...)",
        )
    models = set[str]()
    for call in found:
        model = owner_of(call, "compile")
        statement = statement_of(plan, call, "model.compile")
        if statement is not None and is_chain(model):
            within = [arguments for wrap, arguments in wraps if any(wrap is node for node in walk(call))]
            plan.needs.add("hvk")
            plan.then(statement, [_prepare(plan, code(model), (within or [wraps[0][1]])[0])])
            models.add(tail(model))
        elif statement is not None:
            plan.refuse(call, "a model needs a name to be prepared")
    return models


def _is_plain(plan: Rewrite, compiled: cst.Call) -> bool:
    """Returns True if a model is compiled with an optimizer of Keras that is made there, or named by a string."""
    first = compiled.args[0].value if compiled.args and compiled.args[0].keyword is None else None
    given = next((arg.value for arg in compiled.args if literal(arg.keyword) == "optimizer"), first)
    made = isinstance(given, cst.Call) and ".optimizers." in plan.source.qualified(given.func)
    return given is None or made or isinstance(given, cst.SimpleString)


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
def _move_load(plan: Rewrite, call: cst.Call) -> set[str]:
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
    if "gradient_accumulation_steps" in plan.needs:
        more.append(f"{model}.optimizer.gradient_accumulation_steps = None")
        plan.note(call, "hvd.load_model forgets backward_passes_per_step; so does the new script, by the line below it")
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
    """Removes the statements that only pin a GPU: `hvdtrain.init` does, and they would come too late."""
    source, local = plan.source, plan.prefix + "local_rank"
    for pin in walk(source.module):
        if _pins(pin, source, local) and source.mentions(pin, local):
            for node in walk(source.function(pin)):
                if _pins(node, source, local):
                    plan.settle(node)
                    plan.remove(node)


def _pins(node: cst.CSTNode, source: Script, local: str) -> TypeGuard[Statement]:
    """Returns True if a statement only chooses this rank's GPU, or how its memory is taken."""
    if isinstance(node, cst.SimpleStatementLine):
        value = getattr(node.body[0], "value", None)
        name = source.qualified(value.func) if isinstance(value, cst.Call) else ""
        does = name.split(".")[-1] if name.startswith("tensorflow.config.") else ""
        return does == "set_memory_growth" or (does == "set_visible_devices" and source.mentions(node, local))
    if isinstance(node, (cst.If, cst.For)) and node.orelse is None and isinstance(node.body, cst.IndentedBlock):
        return all(_pins(one, source, local) for one in node.body.body)
    return False
